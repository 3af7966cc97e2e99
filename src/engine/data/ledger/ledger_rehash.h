// Comparison of a ledger with the data: the samples of some steps are read again.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/data/ledger/ledger_check.h"
#include "engine/data/sampler.h"

namespace tandem {

/// Reads the samples of `steps` of the ledger's steps, evenly spread with the first and the last
/// (0: all), and compares their hash with the recorded one. Returns a line for each that differs.
/// Calls `advanced` after each step. Throws IoError for data that cannot be read.
std::vector<std::string> rehash_steps(const LedgerCheck& ledger, const Sampler& sampler,
                                      int64_t steps, const std::function<void()>& advanced = {});

}  // namespace tandem
