// HTML of the report and of the live page: each one file with its scripts and styles. Other pages
// begin with the same head.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace tandem {

/// `data`: JSON of a report in which no '<' remains that could end the enclosing script element.
std::string report_page(const std::string& data);
/// Reads `events`, `ranks.json` next to it.
std::string live_page();

/// `data`: JSON array of `tandem fit`, without '<' as well.
std::string fit_page(const std::string& data);

/// Begin of a page, to the end of its header's first lines: title, style, the readers' themes.
/// `more`: rules of this page only.
std::string page_head(std::string_view title, std::string_view more = {});

/// A mark of a page, and the text in its position.
using PageMark = std::pair<std::string_view, std::string_view>;
/// Replaces marks, in the order of the text, in one pass: a mark inside a replacement is not
/// expanded.
std::string fill_page(std::string_view html, std::span<const PageMark> marks);

}  // namespace tandem
