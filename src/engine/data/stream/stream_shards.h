// Shards of a stream: files that are read from begin to end, a unit after the other, without a
// count of their tokens beforehand.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/data/manifest.h"
#include "engine/tokenizer/tokenizer.h"

namespace tandem {

/// Tokens that are read together: a block of text, some lines of JSON Lines, a run of a token file.
/// They depend on the shard and the unit's offset only.
struct ShardUnit {
  std::vector<int32_t> tokens;
  std::vector<int32_t> document_begins;  ///< positions in `tokens`
  uint64_t end = 0;                      ///< offset of the next unit
};

class ShardReader {
 public:
  virtual ~ShardReader() = default;
  /// The smaller of `end` and the offset of the shard's end. A compressed shard is unpacked up to
  /// there, and throws IoError where it is damaged.
  virtual uint64_t reach(uint64_t end) const = 0;
  bool ends_at(uint64_t offset) const { return reach(offset + 1) == offset; }
  /// Unit at `offset`, which is 0 or the end of another. Throws IoError naming a file that cannot
  /// be read, has changed or is damaged. Not thread-safe.
  virtual ShardUnit read(uint64_t offset) const = 0;
  /// Throws IoError naming the file if it has changed.
  virtual void verify() const = 0;
  /// Tokens of a unit if offsets count tokens and all units but the last have as many; else 0.
  virtual int64_t unit_tokens() const { return 0; }
};

/// As listed when the run began.
struct ShardFile {
  std::string path;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;
};
/// Throws IoError naming a file that is gone.
ShardFile list_shard(const std::string& path);

struct ShardFormat {
  std::string name;  ///< "text", "jsonl" or "tokens"
  int64_t vocab = 0;
  std::shared_ptr<const Tokenizer> tokenizer;  ///< of text and JSON Lines
  bool reads_documents = false;                ///< token files have an index or separators
  std::string separator = {};                  ///< between documents of text
  int32_t separator_token = -1;                ///< between those of token files
  std::string text_key = "text";               ///< of JSON Lines
};

/// Opens it and reads samples of its content. Throws IoError naming a file that is gone, damaged,
/// has changed since it was listed, or differs from its record in `known`.
std::unique_ptr<ShardReader> open_shard(const ShardFile& file, const ShardFormat& format,
                                        const Manifest& known);

}  // namespace tandem
