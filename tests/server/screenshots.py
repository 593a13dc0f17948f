"""Takes the pictures of the page for docs/: python -m tests.server.screenshots. It needs chromium and playwright."""

from pathlib import Path

from specengine.tensor_parallel.loading import load_model
from tests.server.browsers import SIZES, ask, browser, opened
from tests.server.servers import served

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    model = load_model("smollm2-135m", device="cpu")
    settings = {"name": "smollm2-135m", "drafters": ("auto", "none", "prompt_lookup", "suffix", "eagle3")}
    with served(model, **settings) as address, browser() as chromium:
        for size in SIZES:
            with opened(chromium, address, size, color_scheme="light" if size == "laptop" else "dark") as page:
                page.check("#compare")
                page.fill("#tokens", "110")
                ask(page)
                page.wait_for_selector(".verdict:not([hidden])")
                page.locator("header").evaluate("element => element.scrollIntoView()")
                page.screenshot(path=DOCS / f"serve-{size}.png")


if __name__ == "__main__":
    main()
