"""A pipeline graph as a drawing: Mermaid text, SVG, and a self-contained HTML page."""
