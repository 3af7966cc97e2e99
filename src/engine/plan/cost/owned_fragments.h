// Memory of learners' exchanges on a rank, from the weights that it owns: exact, where shares of
// the model are not. Owners have a shard of each of a few large buckets, thus much of one fragment
// and nothing of another.
#pragma once

#include <cstdint>
#include <span>

#include "engine/model/layout.h"
#include "engine/parallel/config.h"
#include "engine/parallel/sync/outer_sync.h"

namespace tandem {

/// Bytes of the data-parallel rank that needs most, of those with these pipeline stages; nothing
/// with one learner. `whole`: all of the model.
ExchangeBytes largest_exchange_bytes(const ParallelConfig& parallel, const ModelLayout& whole,
                                     std::span<const ModelLayout> stages, int64_t bucket_elements);

}  // namespace tandem
