"""`longseq schema`: the JSON Schema of sweep files, for editors."""


def schema(built_in: bool = False) -> int:
    """Print the JSON Schema of sweep files, with the options of every implementation.

    Editors use it for completion, help and checks. Save it with `longseq schema >
    sweep.schema.json` and make this the first line of a config in the same folder (VS Code with
    the YAML extension; PyCharm reads it too):

    # yaml-language-server: $schema=sweep.schema.json

    Options:
        built_in: Leave out the implementations of plug-ins. Default: all are in.
    """
    from longseq_bench.cli.session import print_json
    from longseq_bench.config.schema import config_schema
    from longseq_bench.launchers.local import LocalLauncher

    with LocalLauncher() as launcher:
        catalogue = launcher.catalogue()
    if built_in:
        entries = catalogue.implementations.items()
        built_in_entries = {name: entry for name, entry in entries if entry.source == "built-in"}
        catalogue = catalogue.model_copy(update={"implementations": built_in_entries})
    print_json(config_schema(catalogue))
    return 0
