"""Recurrent models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .parts import describe, rows, texts


class LSTM(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return scores


class GRU(nn.Module):
    """Its last state is read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 16, 2, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs, last = self.gru(x)
        scores: Tensor = self.head(torch.cat([outputs.mean(1), last[-1]], -1))
        return scores


class BiLSTM(nn.Module):
    """In both directions, then an attention over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 8, bidirectional=True, batch_first=True)
        self.weight, self.head = nn.Linear(16, 1), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        weight = self.weight(outputs).softmax(1)
        scores: Tensor = self.head((weight * outputs).sum(1))
        return scores


class RNN(nn.Module):
    """Given its first state as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 16, batch_first=True, nonlinearity="relu")
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, last = self.rnn(x, state.transpose(0, 1).contiguous())
        return self.head(outputs), last


class LstmCells(nn.Module):
    """A cell called once a time step, in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = x.new_zeros(x.shape[0], 16)
        for step in range(x.shape[1]):
            hidden, memory = self.cell(x[:, step], (hidden, memory))
        scores: Tensor = self.head(hidden)
        return scores


class Translator(nn.Module):
    """Encoder and decoder with attention between them (Bahdanau et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(source))
        outputs, _ = self.decoder(self.target(target), state)
        weight = (outputs @ memory.transpose(1, 2)).softmax(-1)
        scores: Tensor = self.head(torch.cat([outputs, weight @ memory], -1))
        return scores


def _pair_of_texts() -> dict[str, Tensor]:
    draw = texts()
    return {"source": draw(), "target": draw()}


ARCHITECTURES = (
    describe("recurrent", LSTM, texts()),
    describe("recurrent", GRU, rows(2, 6, 8)),
    describe("recurrent", BiLSTM, texts()),
    describe("recurrent", RNN, lambda: (torch.randn(2, 6, 8), torch.randn(2, 1, 16))),
    describe("recurrent", LstmCells, rows(2, 6, 8)),
    describe("recurrent", Translator, _pair_of_texts),
)
