"""Texts that Markdown or HTML could take for markup, and what a piece of HTML holds."""

from html.parser import HTMLParser

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "</pre></td></table><script>alert(1)</script>",
    "</style></title><svg onload=alert(1)>",
    '" onmouseover="alert(1)',
    "' style='position:fixed;inset:0",
    "<!-- <b>",
    "<![CDATA[<b>]]>",
    "<?php echo 1 ?>",
    "&lt;script&gt; &amp; &#x3c;b&#x3e; &colon;",
    "[x](javascript:alert(1))",
    "[x](  java\nscript:alert(1))",
    "[x]: javascript:alert(1)",
    "[x][y] [^1]",
    "![](http://127.0.0.1:9/x.png)",
    "<http://127.0.0.1:9/x>",
    "see https://127.0.0.1:9/x or www.example.org or a.b@example.org",
    "javascript:alert(1)",
    "data:text/html,<b>x</b>",
    "$\\href{javascript:alert(1)}{x}$ costs $5",
    "$$\\require{html}$$",
    "\\(x\\) \\[y\\] \\\\(z\\\\) \\begin{a}x\\end{a}",
    "a | b\n--- | ---\n1 | 2",
    "| a |\n|---|\n| 1 |",
    "\n# heading\n",
    "text\n===\ntext\n---",
    "- item\n- item",
    "+ item",
    "* item",
    "1. item\n12) item",
    "12. item",
    "> quote",
    "    indented code",
    "```python\nimport os\n```",
    "~~~\ncode",
    "`code` ``code`` `",
    "**bold** __bold__ *it* _it_ ~~gone~~",
    "{% raw %} {{ 1 + 1 }} {0} %s $HOME",
    "a \\* b \\ c\\",
    "---",
    "a  \nb",
    "Ünïcödé 日本語 🙂",
]


class Page(HTMLParser):
    """The elements, attributes and text of a piece of HTML."""

    def __init__(self, markup: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.values: list[str] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.values += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.tags.append("comment")

    def handle_decl(self, decl: str) -> None:
        self.tags.append("declaration")

    unknown_decl = handle_pi = handle_decl


def words(text: str) -> str:
    return " ".join(text.split())
