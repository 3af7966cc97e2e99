// HTML of the report and of the live page: each one file with its scripts and styles.
#pragma once

#include <string>

namespace tandem {

/// `data`: JSON of a report in which no '<' remains that could end the enclosing script element.
std::string report_page(const std::string& data);
/// Reads `events`, `ranks.json` next to it.
std::string live_page();

}  // namespace tandem
