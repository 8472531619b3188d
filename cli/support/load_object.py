"""Python objects named on the command line as ``package.module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidInput
from ...core.units import name_type

if TYPE_CHECKING:
    from ...core.plan.plan import Plan


def load_object(target: str) -> Any:
    """Import the object named ``package.module:name``; the current directory is searched first."""
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise InvalidInput(f"cannot read {target!r}; write package.module:name")
    # An installed command, unlike `python -m`, does not have the user's directory on its path.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise InvalidInput(f"{module_name} is a file; name its module: {dotted}:{attribute}")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidInput(
                f"{module_name} imports {error.name}, which is not installed here"
            ) from error
        raise InvalidInput(
            f"there is no module {error.name!r} in {os.getcwd()} or among the installed packages; "
            "for a function build in my_model.py write my_model:build, in its folder"
        ) from error
    except (Exception, SystemExit) as error:  # a script without a main guard may call exit()
        raise InvalidInput(f"importing {module_name} failed: {_describe(error)}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            near = " or ".join(map(repr, get_close_matches(name, {*dir(found)} - {name}, n=3)))
            meant = f"; did you mean {near}?" if near else ""
            raise InvalidInput(f"{module_name} has no {attribute!r}{meant}")
        found = getattr(found, name)
    return found


def call_object(target: str) -> Any:
    """Call the function named ``package.module:name`` without arguments and return its result."""
    factory = load_object(target)
    if not callable(factory):
        raise InvalidInput(f"{target} is {name_type(factory)}, not a function")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"calling {target} failed: {_describe(error)}") from error


def load_model(model: str | None, sample: str | None) -> tuple[Any, Any]:
    """Return the user's module and sample; ``model`` names a module, its factory or a ``.pt2``."""
    if model is not None and model.endswith(".pt2"):
        if sample is not None:
            raise InvalidInput(
                f"{model} is captured and measured with the sample it was exported with: leave out "
                "--sample; to run a plan, name the function that returns the model"
            )
        from ...capture.exported_program import load_exported

        return load_exported(Path(model))
    if model is not None and model.endswith(".py"):
        name = Path(model).stem
        raise InvalidInput(
            f"{model} is a file; name the functions in it that return the model and a sample, "
            f"such as {name}:build --sample {name}:sample"
        )
    if model is not None and sample is None:
        raise InvalidInput(
            f"{model} needs a sample, one micro-batch of its inputs: add --sample "
            "package.module:function"
        )
    if model is None or sample is None:
        raise InvalidInput(
            "name a model and its sample (MODEL --sample package.module:function), "
            "a --family, or a JSON file"
        )
    module = load_object(model)
    # A module class has the methods of a module, too, but is a factory.
    if isinstance(module, type) or not hasattr(module, "named_parameters"):
        module = call_object(model)
    if not hasattr(module, "named_parameters"):
        raise InvalidInput(f"{model} returned {name_type(module)}, not a torch.nn.Module")
    return module, call_object(sample)


def refuse_options(what: str, options: dict[str, Any]) -> None:
    """Raise `InvalidInput` if any of these options was given: it would be ignored."""
    for name, value in options.items():
        if value not in (None, [], ()):
            raise InvalidInput(f"{name} cannot be combined with {what}")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class OwnModel:
    """Model of a user's own for commands that run a plan: names of functions.

    Attributes:
        model: Returns the model.
        sample: Returns the inputs of one micro-batch.
        loss: Takes output and target; without it, the loss is the mean square of all outputs.
        target: Returns the target of one micro-batch.
    """

    model: str
    sample: str
    loss: str | None = None
    target: str | None = None

    @classmethod
    def of(
        cls, command: str, plan: Plan, model: str | None, sample: str | None,
        loss: str | None, target: str | None,
    ) -> OwnModel | None:  # fmt: skip
        """Return the model that was named; `None` where the plan is of a model family.

        Raises:
            InvalidInput: Something is missing.
        """
        if model is None and sample is None:
            if plan.spec is None:
                raise InvalidInput(
                    "the plan's model is not from a model family; name the model: "
                    f"stagewright {command} PLAN package.module:function "
                    "--sample package.module:function"
                )
            if loss is not None or target is not None:
                raise InvalidInput("--loss and --target are for a MODEL with its --sample")
            return None
        if model is None or sample is None:
            raise InvalidInput("name both the model and its sample: MODEL --sample")
        if (loss is None) != (target is None):
            raise InvalidInput("--loss and --target must be given together")
        return cls(model, sample, loss, target)

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Let a worker's command line name such a model, as ``--own`` and `words` do."""
        parser.add_argument("--own")
        for name in ("sample", "loss", "target"):
            parser.add_argument(f"--{name}")

    @classmethod
    def read_arguments(cls, given: Namespace) -> OwnModel | None:
        """Return the model that a worker's command line names, if any."""
        return cls(given.own, given.sample, given.loss, given.target) if given.own else None

    @property
    def words(self) -> list[str]:
        """Return the words of a command line that name it."""
        flags = {"--sample": self.sample, "--loss": self.loss, "--target": self.target}
        given = ((flag, value) for flag, value in flags.items() if value is not None)
        return [self.model, *(word for pair in given for word in pair)]

    def build(self) -> Any:
        """Build the model."""
        return load_model(self.model, self.sample)[0]

    def load_loss(self) -> Callable[[Any, Any], Any]:
        """Return the loss; an error inside it is reported as `InvalidInput`."""
        from ...runtime.engine.microbatch import describe_shapes
        from ...runtime.verify import mean_of_squares

        if self.loss is None:
            return mean_of_squares
        name, loss_fn = self.loss, load_object(self.loss)
        if not callable(loss_fn):
            raise InvalidInput(
                f"{name} is {name_type(loss_fn)}, not a function of (output, target)"
            )

        def call_loss(output: Any, target: Any) -> Any:
            try:
                return loss_fn(output, target)
            except Exception as error:
                raise InvalidInput(
                    f"the loss {name} failed on a micro-batch, with output "
                    f"{describe_shapes(output)} and target {describe_shapes(target)}: "
                    f"{type(error).__name__}: {error}"
                ) from error

        return call_loss

    def make_microbatches(self, plan: Plan) -> tuple[list[Any], list[Any]]:
        """Return inputs and target of every micro-batch of a step, newly drawn."""
        from ...runtime.verify import make_dummy_target

        count = range(plan.num_microbatches)
        samples = [call_object(self.sample) for _ in count]
        if self.target is None:
            return samples, [make_dummy_target(plan.inputs[0].shape[0]) for _ in count]
        return samples, [call_object(self.target) for _ in count]
