// All overlap operators. A new one is a folder that defines its row (contract/operator_row.h), and
// a line in registry.cc; the benchmark, the tests and `tandem info` then know it.
#pragma once

#include <string_view>
#include <vector>

#include "overlap/contract/operator_row.h"

namespace tandem {

/// Rows of all operators; a test may add one before it starts a world.
std::vector<const OperatorRow*>& operators();
/// nullptr if there is none of that name.
const OperatorRow* find_operator(std::string_view name);

}  // namespace tandem
