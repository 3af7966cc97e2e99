#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <vector>

#include "core/system/files.h"
#include "engine/data/tokens/token_layout.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kIndexHeader = 34;
constexpr int64_t kCheckedEntries = 1 << 16;  // at once
constexpr int64_t kCheckedBelow = 5'000'000;  // about 64 MiB
constexpr int64_t kCheckedRanges = 32;

/// Sections of an open .idx file: lengths (int32) and byte offsets (int64) of the sequences, then
/// the first sequence of each document (int64) and the number of sequences.
class IndexFile {
 public:
  explicit IndexFile(const std::string& path) : path_(path), file_(open_for_reading(path)) {
    bytes_ = file_size(file_.get(), path);
    char header[kIndexHeader] = {};
    const size_t got = read_at(file_.get(), path, header, sizeof header, 0);
    if (got < 9 || std::memcmp(header, "MMIDIDX\0\0", 9) != 0) {
      throw IoError(fmt::format("{}: does not begin as an index of Megatron-LM does", path));
    }
    if (got < sizeof header) refuse("ends in its header");
    uint64_t version = 0;
    std::memcpy(&version, header + 9, 8);
    std::memcpy(&type_code_, header + 17, 1);
    std::memcpy(&sequences_, header + 18, 8);
    std::memcpy(&entries_, header + 26, 8);
    if (version != 1) refuse(fmt::format("has version {}: expected 1", version));
    constexpr int64_t kMax = int64_t(1) << 48;
    if (sequences_ < 0 || sequences_ > kMax || entries_ < 1 || entries_ > kMax) {
      refuse(fmt::format("has {} sequences and {} document entries", sequences_, entries_));
    }
    const uint64_t expected = kIndexHeader + 12 * uint64_t(sequences_) + 8 * uint64_t(entries_);
    // Indices of multimodal data have a byte more per sequence.
    if (bytes_ != expected && bytes_ != expected + uint64_t(sequences_)) {
      refuse(fmt::format("holds {} bytes: expected {} for {} sequences and {} document entries",
                         bytes_, expected, sequences_, entries_));
    }
  }

  TokenType type() const {
    static constexpr TokenType kTypes[] = {TokenType::u8, TokenType::i8, TokenType::i16,
                                           TokenType::i32, TokenType::i64};
    if (type_code_ >= 1 && type_code_ <= 5) return kTypes[type_code_ - 1];
    if (type_code_ == 8) return TokenType::u16;
    refuse(fmt::format("has type code {}: expected an integer type, 1 to 5 or 8", type_code_));
  }
  int64_t sequences() const { return sequences_; }
  int64_t documents() const { return entries_ - 1; }

  std::vector<int32_t> lengths(int64_t first, int64_t count) const {
    return read<int32_t>(kIndexHeader, first, count);
  }
  std::vector<int64_t> offsets(int64_t first, int64_t count) const {
    return read<int64_t>(kIndexHeader + 4 * uint64_t(sequences_), first, count);
  }
  std::vector<int64_t> document_entries(int64_t first, int64_t count) const {
    return read<int64_t>(kIndexHeader + 12 * uint64_t(sequences_), first, count);
  }
  [[noreturn]] void refuse(const std::string& why) const {
    throw IoError(fmt::format("{}: damaged index: {}", path_, why));
  }

 private:
  template <typename T>
  std::vector<T> read(uint64_t section, int64_t first, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    const uint64_t offset = section + uint64_t(first) * sizeof(T);
    const size_t bytes = values.size() * sizeof(T);
    if (read_at(file_.get(), path_, values.data(), bytes, offset) < bytes) {
      throw IoError(path_ + ": cut while it was read");
    }
    return values;
  }

  const std::string& path_;
  FileDescriptor file_;
  uint64_t bytes_ = 0;
  uint8_t type_code_ = 0;
  int64_t sequences_ = 0, entries_ = 0;
};

/// Calls `check(first, count)` for all of `total` entries, or for evenly spread ranges of them.
template <typename Check>
void check_entries(int64_t total, const Check& check) {
  if (total <= kCheckedBelow) {
    for (int64_t first = 0; first < total; first += kCheckedEntries) {
      check(first, std::min(kCheckedEntries, total - first));
    }
    return;
  }
  for (int64_t i = 0; i < kCheckedRanges; ++i) {
    const int64_t last = total - kCheckedEntries;
    check(int64_t(__int128(last) * i / (kCheckedRanges - 1)), kCheckedEntries);
  }
}

/// Checks that sequences follow one another without gaps.
void check_sequences(const IndexFile& index, int64_t item, uint64_t bin_bytes) {
  const int64_t sequences = index.sequences();
  if (sequences == 0) {
    if (bin_bytes > 0) {
      index.refuse(fmt::format("has no sequence, the .bin file {} bytes", bin_bytes));
    }
    return;
  }
  check_entries(sequences, [&](int64_t first, int64_t count) {
    const bool is_last = first + count == sequences;
    const std::vector<int32_t> lengths = index.lengths(first, count);
    std::vector<int64_t> offsets = index.offsets(first, is_last ? count : count + 1);
    if (first == 0 && offsets[0] != 0) {
      index.refuse(fmt::format("its first sequence begins at byte {}: expected 0", offsets[0]));
    }
    if (is_last) offsets.push_back(int64_t(bin_bytes));
    for (size_t i = 0; i < lengths.size(); ++i) {
      const int64_t sequence = first + int64_t(i);
      const auto end = __int128(offsets[i]) + __int128(lengths[i]) * item;
      if (lengths[i] >= 0 && offsets[i] >= 0 && end == offsets[i + 1]) continue;
      index.refuse(fmt::format(
          "sequence {} begins at byte {} with {} tokens of {} bytes: expected its end to be {} {}",
          sequence, offsets[i], lengths[i], item,
          sequence + 1 == sequences ? "the end of the .bin file, byte" : "the next one's begin,",
          offsets[i + 1]));
    }
  });
}

void check_documents(const IndexFile& index) {
  const int64_t documents = index.documents(), sequences = index.sequences();
  check_entries(documents + 1, [&](int64_t first, int64_t count) {
    const std::vector<int64_t> entries = index.document_entries(first, count);
    int64_t before = first == 0 ? 0 : entries[0];
    for (size_t i = 0; i < entries.size(); ++i) {
      const int64_t document = first + int64_t(i);
      const bool is_end = document == documents;
      const bool fits = entries[i] >= before && entries[i] <= sequences &&
                        (document > 0 || entries[i] == 0) && (!is_end || entries[i] == sequences);
      if (!fits) {
        index.refuse(fmt::format("document {} begins at sequence {}: expected {} to {}", document,
                                 entries[i], is_end ? sequences : before,
                                 document == 0 ? 0 : sequences));
      }
      before = entries[i];
    }
  });
}

}  // namespace

TokenLayout read_megatron_index(const std::string& path, uint64_t bin_bytes, double val_fraction) {
  const IndexFile index(path);
  TokenLayout layout;
  layout.type = index.type();
  const int64_t item = bytes_of(layout.type);
  check_sequences(index, item, bin_bytes);
  check_documents(index);
  layout.tokens = int64_t(bin_bytes) / item;
  layout.documents = index.documents();
  layout.training_tokens = layout.tokens;
  if (val_fraction == 0) return layout;
  if (layout.documents < 2) {
    layout.training_tokens -= int64_t(double(layout.tokens) * val_fraction);
    return layout;
  }
  const int64_t rounded = std::llround(double(layout.documents) * val_fraction);
  const int64_t held_out = std::clamp<int64_t>(rounded, 1, layout.documents - 1);
  const int64_t sequence = index.document_entries(layout.documents - held_out, 1)[0];
  if (sequence < 0 || sequence > index.sequences()) {
    index.refuse(fmt::format("document {} begins at sequence {}: expected 0 to {}",
                             layout.documents - held_out, sequence, index.sequences()));
  }
  if (sequence == index.sequences()) return layout;
  const int64_t offset = index.offsets(sequence, 1)[0];
  if (offset < 0 || offset % item != 0 || uint64_t(offset) > bin_bytes) {
    index.refuse(fmt::format("sequence {} begins at byte {} of {}", sequence, offset, bin_bytes));
  }
  layout.training_tokens = offset / item;
  return layout;
}

std::vector<int64_t> read_index_begins(const std::string& path) {
  const IndexFile index(path);
  const int64_t item = bytes_of(index.type());
  std::vector<int64_t> begins;
  int64_t next = 0;  // sequence after the ones in `offsets`
  std::vector<int64_t> offsets;
  const int64_t documents = index.documents();
  for (int64_t first = 0; first < documents; first += kCheckedEntries) {
    const int64_t count = std::min(kCheckedEntries, documents - first);
    for (const int64_t sequence : index.document_entries(first, count)) {
      const int64_t before = next - int64_t(offsets.size());
      if (sequence < before || sequence > index.sequences()) {
        index.refuse(fmt::format("a document begins at sequence {}: expected {} to {}", sequence,
                                 before, index.sequences()));
      }
      if (sequence == index.sequences()) continue;  // empty, at the end
      if (sequence >= next) {
        offsets = index.offsets(sequence, std::min(kCheckedEntries, index.sequences() - sequence));
        next = sequence + int64_t(offsets.size());
      }
      const int64_t begin = offsets[size_t(sequence - next + int64_t(offsets.size()))] / item;
      if (begin < (begins.empty() ? 0 : begins.back())) {
        index.refuse(fmt::format("sequence {} begins before the one before it", sequence));
      }
      begins.push_back(begin);
    }
  }
  return begins;
}

}  // namespace tandem
