"""The documentation site: pages made of `docs/`, of files of the root, and of the code.

`mkdocs.yml` configures it, `site_hook` is loaded by mkdocs. All other modules need only the package
itself and return Markdown, so tests run them without mkdocs.
"""
