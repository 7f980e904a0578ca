"""`fairturn completion`: commands and options at a press of Tab."""

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, *, shell: str) -> None:
    """Print the script that completes commands in a shell.

    In bash and zsh, write the first or second line into ~/.bashrc or ~/.zshrc; in fish, run the
    third once.

    \b
    eval "$(fairturn completion bash)"
    eval "$(fairturn completion zsh)"
    fairturn completion fish > ~/.config/fish/completions/fairturn.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    root = ctx.find_root()
    click.echo(made(root.command, {}, "fairturn", "_FAIRTURN_COMPLETE").source())
