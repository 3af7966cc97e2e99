"""Hook of mkdocs.yml: links to files of the repository outside docs/ become their paths as code, as the
site does not have them. A link to a file that does not exist is a warning, an error in strict builds. Bars in
code in tables, which GitHub wants escaped, are not."""
import logging
import os
import re

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]*)(?:#[^)\s]*)?\)")
CODE_WITH_BAR = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
log = logging.getLogger("mkdocs.hooks.site_links")


def on_page_markdown(markdown, page, config, files):
    def plain(match):
        text, target = match[1], match[2]
        path = os.path.normpath(os.path.join(config.docs_dir, os.path.dirname(page.file.src_uri), target))
        if path.startswith(config.docs_dir + os.sep):
            return match[0]
        name = os.path.relpath(path, os.path.dirname(config.config_file_path))
        if not os.path.exists(path):
            log.warning("%s: link to %s: no such file", page.file.src_uri, name)
        bare = text.strip("`")
        return f"`{name}`" if name.rstrip("/").endswith(bare.rstrip("/")) else f"{text} (`{name}`)"
    markdown = CODE_WITH_BAR.sub(lambda match: match[0].replace("\\|", "|"), markdown)
    return LINK.sub(plain, markdown)
