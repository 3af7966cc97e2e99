// Hashes of the files that ranks train on, each file read by one of the ranks that see it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/data/text_file.h"
#include "tandem/communicator.h"

namespace tandem {

/// Which of `ranks` reads each of the files of these sizes: the largest first, each by the rank
/// that has least so far.
std::vector<int> deal_files(std::span<const int64_t> sizes, int ranks);

/// Collective; `world`: nullptr for a process that reads alone. The hash of each file as it is now,
/// in order. Ranks of one machine that have the same files open share them; others read their own.
/// Throws IoError on every rank for a file that one of them cannot read.
std::vector<uint64_t> hash_files(Communicator* world, std::span<const TextFile* const> files);

}  // namespace tandem
