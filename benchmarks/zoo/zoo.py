"""All architectures, by name, in the order of the table."""

from . import language, vision

ZOO = {
    architecture.name: architecture
    for architecture in (*language.ARCHITECTURES, *vision.ARCHITECTURES)
}
