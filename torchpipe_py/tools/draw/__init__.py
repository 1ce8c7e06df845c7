"""``torchpipe graph``: a pipeline graph as Mermaid text, SVG and a self-contained HTML page."""
