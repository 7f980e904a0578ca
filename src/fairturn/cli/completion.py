"""`fairturn completion`: shell completion."""

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, *, shell: str) -> None:
    """Print a completion script for a shell.

    Add the first line to ~/.bashrc, or the second to ~/.zshrc; for fish, run the third once.

    \b
    eval "$(fairturn completion bash)"
    eval "$(fairturn completion zsh)"
    fairturn completion fish > ~/.config/fish/completions/fairturn.fish
    """
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None
    root = ctx.find_root()
    click.echo(completion(root.command, {}, "fairturn", "_FAIRTURN_COMPLETE").source())
