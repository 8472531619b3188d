"""All architectures, by name, in the order of the table."""

from . import (
    composed,
    hostile,
    hostile_calls,
    images,
    language,
    perception,
    recurrent,
    traps_choices,
    traps_forms,
    traps_gradients,
    traps_inputs,
    traps_memory,
    traps_state,
    traps_wild,
)

ZOO = {
    architecture.name: architecture
    for architecture in (
        *language.ARCHITECTURES,
        *perception.ARCHITECTURES,
        *images.ARCHITECTURES,
        *recurrent.ARCHITECTURES,
        *composed.ARCHITECTURES,
        *traps_gradients.ARCHITECTURES,
        *traps_choices.ARCHITECTURES,
        *traps_state.ARCHITECTURES,
        *traps_forms.ARCHITECTURES,
        *traps_inputs.ARCHITECTURES,
        *traps_wild.ARCHITECTURES,
        *hostile.ARCHITECTURES,
        *hostile_calls.ARCHITECTURES,
        *traps_memory.ARCHITECTURES,
    )
}
