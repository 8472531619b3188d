"""Models of several parts: towers, graphs of modules, attention, tied weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .parts import MLP, WIDTH, ConvReLU, describe, rows, texts


class PlainSequential(nn.Sequential):
    """Nothing but children, as torchgpipe wants it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, WIDTH), nn.ReLU(), MLP(), nn.Dropout(0.1), MLP())


class TwoTower(nn.Module):
    """An image and a text encoder, joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(ConvReLU(3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        self.project = nn.Linear(8, WIDTH)
        self.embedding = nn.Embedding(32, WIDTH)
        self.text = nn.Sequential(MLP(), MLP())
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        seen = functional.normalize(self.project(self.image(image)), dim=-1)
        read = functional.normalize(self.text(self.embedding(tokens)).mean(1), dim=-1)
        similarity = self.scale.exp() * seen @ read.T
        loss = functional.cross_entropy(similarity, torch.arange(len(seen)))
        return {"loss": loss, "similarity": similarity}


class Siamese(nn.Module):
    """One encoder for both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), MLP(), nn.BatchNorm1d(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        distance: Tensor = self.head((self.encoder(left) - self.encoder(right)).abs())
        return distance


class TransformerEncoder(nn.Module):
    """torch's own, with a mask for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        scores: Tensor = self.head(hidden.mean(1))
        return scores


class Transformer(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(
            self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True
        )
        scores: Tensor = self.head(hidden)
        return scores


class TiedLanguageModel(nn.Module):
    """The head is the embedding, and two blocks share their first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.Sequential(MLP(), MLP(), MLP())
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks.get_submodule("2.rise").weight = self.blocks.get_submodule("0.rise").weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return scores


class LowRank(nn.Module):
    """Frozen weights beside trained ones of low rank (Hu et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.tanh(frozen(x) + up(down(x)))
        return x


class Recommender(nn.Module):
    """Bags of features beside dense ones, multiplied pair by pair (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(32, WIDTH, mode="sum") for _ in range(2))
        self.dense = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU())
        self.head = nn.Linear(9 + WIDTH, 1)

    def forward(self, dense: Tensor, users: Tensor, items: Tensor) -> Tensor:
        known = self.dense(dense)
        parts = [known, *(bag(x) for bag, x in zip(self.bags, (users, items), strict=True))]
        stacked = torch.stack(parts, 1)
        pairs = (stacked @ stacked.transpose(1, 2)).flatten(1)
        scores: Tensor = self.head(torch.cat([known, pairs], 1))
        return scores


class GraphNet(nn.Module):
    """Messages along edges, summed at their ends (Gilmer et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.update = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[:, 0], edges[:, 1]
        for message, update in zip(self.message, self.update, strict=True):
            sent = torch.relu(message(torch.cat([nodes[source], nodes[target]], -1)))
            received = torch.zeros_like(nodes).index_add(0, target, sent)
            nodes = update(received, nodes)
        return nodes


class NormalizingFlow(nn.Module):
    """Affine couplings that add up a log determinant (Dinh et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        determinant = torch.zeros(len(x))
        for net in self.nets:
            kept, changed = x.chunk(2, -1)
            scale, shift = net(kept).chunk(2, -1)
            x = torch.cat([changed * torch.exp(torch.tanh(scale)) + shift, kept], -1)
            determinant = determinant + torch.tanh(scale).sum(-1)
        return x, determinant


class Wavenet(nn.Module):
    """Gated dilated convolutions whose skips are summed up (van den Oord et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 16, 2, dilation=2**k))
            for k in range(3)
        )
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.head = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        total = torch.zeros(())
        for depth, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            value, opened = gate(functional.pad(x, (2**depth, 0))).chunk(2, 1)
            kept = skip(torch.tanh(value) * torch.sigmoid(opened))
            x, total = x + kept, total + kept
        scores: Tensor = self.head(torch.relu(total))
        return scores


def _two_texts() -> dict[str, Tensor]:
    draw = texts()
    return {"source": draw(), "target": draw()}


ARCHITECTURES = (
    describe("composed", PlainSequential, rows(4, 8)),
    describe(
        "composed",
        TwoTower,
        lambda: {"image": torch.randn(4, 3, 16, 16), "tokens": torch.randint(0, 32, (4, 8))},
    ),
    describe("composed", Siamese, lambda: (torch.randn(4, 8), torch.randn(4, 8))),
    describe("composed", TransformerEncoder, texts()),
    describe("composed", Transformer, _two_texts),
    describe("composed", TiedLanguageModel, texts()),
    describe("composed", LowRank, rows(4, WIDTH)),
    describe(
        "composed",
        Recommender,
        lambda: {
            "dense": torch.randn(4, 4),
            "users": torch.randint(0, 32, (4, 3)),
            "items": torch.randint(0, 32, (4, 3)),
        },
    ),
    describe("composed", GraphNet, lambda: (torch.randn(6, WIDTH), torch.randint(0, 6, (10, 2)))),
    describe("composed", NormalizingFlow, rows(4, 8)),
    describe("composed", Wavenet, rows(2, 1, 12)),
)
