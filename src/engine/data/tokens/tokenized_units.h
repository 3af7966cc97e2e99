// Units of text that are tokenized anew whenever they are read: documents, or blocks of a file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/data/stream/shared_work.h"
#include "tandem/error.h"

namespace tandem {

/// Fills `out` with the tokens from `begin` on, and -1 after the last unit's. `starts`: first token
/// of each unit, and the end of the last one. tokenize(unit, tokens) appends a unit's tokens, as
/// many as `starts` says, or throws IoError.
template <typename Tokenize>
void read_units(std::span<const int64_t> starts, int64_t begin, std::span<int32_t> out,
                const Tokenize& tokenize) {
  auto unit = size_t(std::ranges::upper_bound(starts, begin) - starts.begin()) - 1;
  size_t filled = 0;
  std::vector<int32_t> tokens;
  for (; filled < out.size() && unit + 1 < starts.size(); ++unit) {
    tokens.clear();
    tokenize(unit, tokens);
    const auto skipped = size_t(begin + int64_t(filled) - starts[unit]);
    const size_t taken = std::min(tokens.size() - skipped, out.size() - filled);
    std::copy_n(tokens.begin() + long(skipped), taken, out.begin() + long(filled));
    filled += taken;
  }
  std::fill(out.begin() + long(filled), out.end(), -1);
}

/// Verifies all files, with progress named `name`. Collective. Throws IoError.
template <typename Files>
void verify_files(const Files& files, Communicator* world, const char* name) {
  SharedWork work(world, name, 0);
  std::string error;
  try {
    for (const auto& file : files) {
      file->verify();
      work.advance(0);
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
}

}  // namespace tandem
