// Hashes of the training files, each file read by one of the ranks that see it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/data/text/text_file.h"
#include "tandem/communicator.h"

namespace tandem {

/// Reader among `ranks` of each file of these sizes: the largest first, each to the least loaded
/// rank.
std::vector<int> deal_files(std::span<const int64_t> sizes, int ranks);

/// Whether a text of this XXH3-64 hash is held out: copies of one text are in the same split.
inline bool is_held_out(uint64_t hash, double val_fraction) {
  return double(hash) * 0x1p-64 < val_fraction;
}

/// Current hash of each file, in order; `world`: nullptr for a single process. Ranks of one machine
/// with the same files open divide them; others read all of theirs. Throws IoError on every rank
/// for a file that one of them cannot read. Collective.
std::vector<uint64_t> hash_files(Communicator* world, std::span<const TextFile* const> files);

}  // namespace tandem
