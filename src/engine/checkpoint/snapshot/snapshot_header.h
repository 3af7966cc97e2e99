// Header of one generation of a snapshot, as it is in memory: followed by the text of the train
// state and, from the next page on, by the values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tandem {

constexpr size_t kHashDigits = 32;

struct SnapshotHeader {
  char magic[8];
  int64_t step;
  uint64_t start;  ///< of the run, at which it was taken: steps of two starts are not combined
  uint64_t state_bytes, value_bytes;
  char values_hash[kHashDigits];
  char hash[kHashDigits];  ///< of the above, written last; all 0 in an invalid generation

  bool is_valid() const;
  void invalidate();
  /// Completes a header that has step, start, bytes and hash of its values: it is valid from then
  /// on.
  void complete();
  /// Text of the train state, which is not checked.
  std::string state_text() const;
};

/// Sizes that generations in one memory share.
struct SnapshotShape {
  int32_t generations = 0;
  uint64_t state_room = 0;  ///< max bytes of the train state's text
  uint64_t value_bytes = 0;
  char slices[kHashDigits]{};  ///< hash of the positions of the values

  size_t values_at() const;  ///< in a generation
  size_t generation_bytes() const;
  bool operator==(const SnapshotShape&) const = default;
};

}  // namespace tandem
