#include "engine/serve/serve_page.h"

#include <vector>

#include "engine/report/page_assets.h"
#include "engine/report/page_text.h"
#include "engine/serve/serve_page_assets.h"

namespace tandem {

std::string serve_page() {
  const std::string head = page_head("Tandem serve", kServeStyle);
  const std::vector<PageMark> marks{{"@HEAD@", head},
                                    {"@COMMON@", kPageCommon},
                                    {"@MARKDOWN@", kServeMarkdown},
                                    {"@SCRIPT@", kServeScript}};
  return fill_page(kServeHtml, marks);
}

}  // namespace tandem
