"""Runs `specengine serve` within a test."""

from typer.testing import CliRunner

from specengine.cli import main as cli
from tests.server.servers import chat_folder


def run(*options: str, **environment: str):
    return CliRunner().invoke(cli.app, ["serve", "--model", str(chat_folder()), *options], env=environment)
