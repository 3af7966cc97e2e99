// Kinds of files that users have, by their endings, in any case, and by their first bytes.
#pragma once

#include <string>

#include "engine/data/text/unpacked.h"

namespace tandem {

enum class DataKind : uint8_t {
  text,        ///< not what follows, and without NUL bytes
  companion,   ///< text that often accompanies data: README.md, meta.json
  json_lines,  ///< with an object in each line
  chats,       ///< JSON Lines whose first line is a chat (chat_messages.h)
  tokens,      ///< .bin, .idx or .npy
  empty,       ///< 0 bytes
  unreadable,  ///< data in a format that is not read: Parquet
  binary       ///< anything else: a picture
};

struct DataFacts {
  DataKind kind = DataKind::text;
  Compression compression = Compression::none;
  /// "Parquet"; empty but for unreadable and binary files and JSON.
  std::string what = {};
  /// Command that makes data of such a file, or what else to do.
  std::string advice = {};
};

/// Reads the begin of the file. `text_key`: of JSON Lines. Throws IoError if it cannot.
DataFacts inspect_data(const std::string& path, const std::string& text_key);

/// Whether `path` ends with `ending`, given in lower case, in any case.
bool has_ending(const std::string& path, std::string_view ending);
/// Whether the name is that of a token file or of an index.
bool is_token_file(const std::string& path);
/// Path of the file whose name differs in its ending of 4 characters: `ending`, given in lower
/// case, or else in upper case if that is the name of a file.
std::string replace_ending(const std::string& path, std::string_view ending);

}  // namespace tandem
