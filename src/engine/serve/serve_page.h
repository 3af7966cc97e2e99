// Page to chat with a served model.
#pragma once

#include <string>

namespace tandem {

/// HTML in one file with its scripts and styles.
std::string serve_page();

}  // namespace tandem
