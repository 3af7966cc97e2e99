// Place in a stream of shards.
#pragma once

#include <compare>
#include <cstdint>

namespace tandem {

/// Begin of a unit of a shard (stream_shards.h).
struct StreamCursor {
  int64_t epoch = 0;
  int64_t shard = 0;     ///< in the order of its epoch
  int64_t offset = 0;    ///< in the shard, in bytes, or in tokens of a token file
  int64_t position = 0;  ///< tokens of the stream before it, over all epochs
  auto operator<=>(const StreamCursor&) const = default;
};

}  // namespace tandem
