#include "engine/data/data_kind.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/data/text/chat_messages.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kInspected = size_t(64) << 10, kTextInspected = 8000;

/// `{}` in `advice`: the quoted path.
struct Format {
  const char* what;
  const char* advice;
  std::vector<std::string_view> endings;  ///< in lower case
  std::string_view magic = {};
  size_t offset = 0;  ///< of `magic`
};

// The one line of Python that a user needs, by format.
constexpr const char* kParquetAdvice =
    "write JSON Lines: python3 -c 'import json, sys, pyarrow.parquet as p; [print(json.dumps(r, "
    "default=str)) for b in p.ParquetFile(sys.argv[1]).iter_batches() for r in b.to_pylist()]' {} "
    "> data.jsonl";
constexpr const char* kArrowAdvice =
    "write JSON Lines: python3 -c 'import json, sys, pyarrow as a; [print(json.dumps(r, "
    "default=str)) for r in a.ipc.open_file(sys.argv[1]).read_all().to_pylist()]' {} > data.jsonl";
constexpr const char* kArrowStreamAdvice =
    "write JSON Lines: python3 -c 'import json, sys, pyarrow as a; [print(json.dumps(r, "
    "default=str)) for r in a.ipc.open_stream(open(sys.argv[1], \"rb\")).read_all().to_pylist()]' "
    "{} > data.jsonl";
constexpr const char* kJsonAdvice =
    "write JSON Lines: python3 -c 'import json, sys; [print(json.dumps(r)) for r in "
    "json.load(open(sys.argv[1]))]' {} > data.jsonl (or read it as it is with data.format = "
    "\"text\")";
constexpr const char* kOtherAdvice =
    "write its texts to JSON Lines, an object {\"text\": \"...\"} in each line";

/// Data in formats that are not read.
const std::vector<Format>& unreadable_formats() {
  using namespace std::string_view_literals;
  static const std::vector<Format> formats{
      {"a pointer of Git LFS", "git lfs pull", {}, "version https://git-lfs"},
      {"Parquet", kParquetAdvice, {".parquet", ".pq"}, "PAR1"},
      {"an Arrow file", kArrowAdvice, {".feather"}, "ARROW1"},
      {"an Arrow stream", kArrowStreamAdvice, {".arrow"}, "\xff\xff\xff\xff"},
      {"ORC", kOtherAdvice, {".orc"}},
      {"Avro", kOtherAdvice, {".avro"}, "Obj\x01"},
      {"HDF5", kOtherAdvice, {".h5", ".hdf5"}, "\x89HDF"},
      {"SQLite", kOtherAdvice, {".sqlite", ".sqlite3"}, "SQLite format 3"},
      {"TFRecords", kOtherAdvice, {".tfrecord", ".tfrecords"}},
      {"MosaicML shards", kOtherAdvice, {".mds"}},
      {"MessagePack", kOtherAdvice, {".msgpack"}},
      {"LMDB", kOtherAdvice, {".mdb", ".lmdb"}},
      {"NumPy arrays in an archive", "write one array to .npy with numpy.save", {".npz"}},
      {"a spreadsheet", kOtherAdvice, {".xlsx", ".xls", ".ods"}},
      {"a pickle", kOtherAdvice, {".pkl", ".pickle", ".pt", ".pth"}},
      {"a tar archive", "tar -xf {}", {".tar", ".tgz", ".tbz2", ".txz"}, "ustar", 257},
      {"compressed by bzip2", "bzip2 -dk {}", {".bz2"}, "BZh"},
      {"compressed by xz",
       "xz -dk {}",
       {".xz"},
       "\xfd"
       "7zXZ\0"sv},
      {"compressed by lzma", "xz -dk {}", {".lzma"}},
      {"compressed by lz4", "lz4 -dk {}", {".lz4"}, "\x04\x22\x4d\x18"},
      {"compressed by Snappy", "unpack it with snzip -dk {}", {".sz", ".snappy"}},
      {"compressed by Brotli", "brotli -dk {}", {".br"}},
      {"compressed by compress", "uncompress -k {}", {".z"}, "\x1f\x9d"},
      {"a 7-Zip archive", "7z x {}", {".7z"}, "7z\xbc\xaf\x27\x1c"},
      {"a RAR archive", "unrar x {}", {".rar"}, "Rar!\x1a\x07"},
      {"a Zip archive", "unzip {}", {".zip"}},
      {"UTF-16 text", "iconv -f UTF-16 -t UTF-8 {} > utf8.txt", {}, "\xff\xfe"},
      {"UTF-16 text", "iconv -f UTF-16 -t UTF-8 {} > utf8.txt", {}, "\xfe\xff"},
  };
  return formats;
}

/// Files that are no data for a model of text. Others with a NUL byte are binary, too.
const std::vector<Format>& binary_formats() {
  static const std::vector<Format> formats{
      {"a PNG image", "", {}, "\x89PNG"},
      {"a JPEG image", "", {}, "\xff\xd8\xff"},
      {"a GIF image", "", {}, "GIF89a"},
      {"a PDF document", "", {}, "%PDF-"},
      {"a program or library",
       "",
       {},
       "\x7f"
       "ELF"},
      {"audio or video", "", {}, "RIFF"},
      {"audio", "", {}, "ID3"},
      {"audio", "", {}, "OggS"},
      {"audio", "", {}, "fLaC"},
      {"GGUF weights", "", {}, "GGUF"},
      {"a Zip file", "", {}, "PK\x03\x04"},
      {"a font", "", {}, "wOF"},
      {"a pickle", "", {}, "\x80\x02"},
      {"a pickle", "", {}, "\x80\x03"},
      {"a pickle", "", {}, "\x80\x04"},
      {"a pickle", "", {}, "\x80\x05"},
      {"weights", "", {".safetensors", ".gguf"}},
  };
  return formats;
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = char(std::tolower(uint8_t(c)));
  return result;
}

/// Whether a text may begin so.
bool is_word(std::string_view magic) {
  return magic.size() < 5 &&
         std::ranges::all_of(magic, [](char c) { return std::isgraph(uint8_t(c)) != 0; });
}

/// Format of a file with this name, in lower case, and content.
const Format* find_format(const std::vector<Format>& formats, const std::string& name,
                          std::string_view head) {
  for (const Format& format : formats) {
    const bool is_named = std::ranges::any_of(
        format.endings, [&](std::string_view ending) { return name.ends_with(ending); });
    const bool has_magic = !format.magic.empty() && head.size() >= format.offset &&
                           head.substr(format.offset).starts_with(format.magic) &&
                           (!is_word(format.magic) || head.find('\0') != head.npos);
    if (is_named || has_magic) return &format;
  }
  return nullptr;
}

DataFacts facts_of(DataKind kind, const Format& format, const std::string& path) {
  std::string advice = format.advice;
  if (const size_t at = advice.find("{}"); at != advice.npos) {
    advice.replace(at, 2, shell_quote(path));
  }
  return {kind, Compression::none, format.what, advice};
}

/// Whether the name, in lower case, is that of a file beside data.
bool is_companion(const std::string& name) {
  static constexpr std::string_view kBegins[] = {
      "readme",   "license",   "licence",   "notice",   "copying",
      "citation", "authors",   "changelog", "makefile", "requirements",
      "_success", "tokenizer", "vocab",     "merges",   "special_tokens"};
  static constexpr std::string_view kEnds[] = {
      ".md",   ".rst",    ".yaml", ".yml",     ".toml", ".ini",  ".cfg",
      ".log",  ".py",     ".sh",   ".ipynb",   ".lock", ".crc",  ".md5",
      ".sha1", ".sha256", "sums",  "sums.txt", ".html", ".json", ".bib"};
  const auto is_in = [&](const auto& all, const auto& matches) {
    return std::ranges::any_of(all, matches);
  };
  return is_in(kBegins, [&](std::string_view begin) { return name.starts_with(begin); }) ||
         is_in(kEnds, [&](std::string_view end) { return name.ends_with(end); });
}

/// First line that is not blank, and what follows it.
std::string_view take_line(std::string_view& text) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.find_first_not_of(" \t\r") != line.npos) return line;
  }
  return {};
}

/// Whether the first line is an object with the key, or is followed by another object. `head`: the
/// file, or its begin.
bool looks_like_json_lines(std::string_view head, const std::string& key) {
  std::string_view rest = without_bom(head);
  const std::string_view line = take_line(rest);
  if (line.find_first_not_of(" \t") == line.npos || line[line.find_first_not_of(" \t")] != '{') {
    return false;
  }
  const bool is_cut = rest.empty() && head.size() >= kInspected;
  if (is_cut) return line.find("\"" + key + "\"") != line.npos;
  const auto root = nlohmann::json::parse(line, nullptr, false);
  if (root.is_discarded() || !root.is_object()) return false;
  return root.contains(key) || take_line(rest).starts_with('{');
}

/// Kind of JSON Lines. `head`: the file, or its begin.
DataKind kind_of_lines(std::string_view head) {
  std::string_view rest = without_bom(head);
  while (!rest.empty()) {
    const std::string_view line = take_line(rest);
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    return is_chat_line(line) ? DataKind::chats : DataKind::json_lines;
  }
  return DataKind::json_lines;
}

/// Whether names with this ending tell nothing: none, or a number, as of parts of a file.
bool is_unknown_ending(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == name.npos || dot == 0 || dot + 1 == name.size() ||
         std::isdigit(uint8_t(name[dot + 1]));
}

/// `name`: in lower case, without the ending of a compressed file.
DataFacts inspect_content(const std::string& path, const std::string& name, std::string_view head,
                          const std::string& text_key) {
  static constexpr std::string_view kJsonLines[] = {".jsonl", ".ndjson", ".jsonlines", ".ldjson"};
  if (head.empty()) return {DataKind::empty};
  if (const Format* format = find_format(unreadable_formats(), name, head)) {
    return facts_of(DataKind::unreadable, *format, path);
  }
  if (const Format* format = find_format(binary_formats(), name, head)) {
    return facts_of(DataKind::binary, *format, path);
  }
  if (head.substr(0, kTextInspected).find('\0') != head.npos) {
    return {DataKind::binary, Compression::none, "no text: it holds NUL bytes",
            "name text, JSON Lines or token files; bytes of any kind are read with data.format = "
            "\"text\""};
  }
  if (std::ranges::any_of(kJsonLines, [&](std::string_view end) { return name.ends_with(end); })) {
    return {kind_of_lines(head)};
  }
  const bool is_json = name.ends_with(".json");
  if ((is_json || is_unknown_ending(name)) && looks_like_json_lines(head, text_key)) {
    return {kind_of_lines(head)};
  }
  if (!is_json) return {is_companion(name) ? DataKind::companion : DataKind::text};
  const std::string key = "\"" + text_key + "\"";
  const bool is_data = without_bom(head).find_first_of("[{") != head.npos &&
                       without_bom(head)[without_bom(head).find_first_not_of(" \t\r\n")] == '[' &&
                       head.find(key) != head.npos;
  const Format json{"JSON that is not one object a line", kJsonAdvice, {}};
  return facts_of(is_data ? DataKind::unreadable : DataKind::companion, json, path);
}

DataFacts inspect_tokens(const std::string& path, std::string_view head) {
  if (head.starts_with("version https://git-lfs")) {
    return facts_of(DataKind::unreadable, unreadable_formats()[0], path);
  }
  const bool is_bare = has_ending(path, ".bin") && !path_exists(replace_ending(path, ".idx"));
  const Format* format = is_bare ? find_format(binary_formats(), "", head) : nullptr;
  return format ? facts_of(DataKind::binary, *format, path) : DataFacts{DataKind::tokens};
}

/// Name without the ending of a compressed file; nullopt: it has none.
std::optional<std::string> without_compression(const std::string& name) {
  for (const std::string_view ending : {".gz", ".gzip", ".zst", ".zstd"}) {
    if (name.ends_with(ending)) return name.substr(0, name.size() - ending.size());
  }
  return {};
}

}  // namespace

bool has_ending(const std::string& path, std::string_view ending) {
  return path.size() >= ending.size() && lower(path.substr(path.size() - ending.size())) == ending;
}

bool is_token_file(const std::string& path) {
  return has_ending(path, ".bin") || has_ending(path, ".npy") || has_ending(path, ".idx");
}

std::string replace_ending(const std::string& path, std::string_view ending) {
  const std::string stem = path.substr(0, path.size() - 4);
  std::string upper(ending);
  for (char& c : upper) c = char(std::toupper(uint8_t(c)));
  std::string lower_path = stem + std::string(ending);
  return !path_exists(lower_path) && path_exists(stem + upper) ? stem + upper : lower_path;
}

DataFacts inspect_data(const std::string& path, const std::string& text_key) {
  const FileDescriptor file = open_for_reading(path);
  const uint64_t bytes = file_size(file.get(), path);
  std::string head(size_t(std::min<uint64_t>(bytes, kInspected)), '\0');
  head.resize(read_at(file.get(), path, head.data(), head.size(), 0));
  std::string name = lower(std::filesystem::path(path).filename().string());
  if (head.empty()) return {DataKind::empty};
  if (is_token_file(name)) return inspect_tokens(path, head);
  const Compression compression = find_compression(head);
  const std::optional<std::string> inner = without_compression(name);
  if (compression == Compression::none) {
    if (!inner || head.starts_with("version https://git-lfs")) {
      return inspect_content(path, name, head, text_key);
    }
    return {DataKind::unreadable, compression, "not compressed, as its name says it were",
            "give it the ending of what it holds"};
  }
  const auto unpacker =
      open_unpacker({path, compression, bytes, [&](uint64_t offset, std::span<std::byte> out) {
                       if (read_at(file.get(), path, out.data(), out.size(), offset) == out.size())
                         return;
                       throw IoError(path + ": cut while it was read");
                     }});
  head.resize(kInspected);
  head.resize(unpacker->read(std::as_writable_bytes(std::span(head))));
  if (inner) name = *inner;
  const char* const unpack = compression == Compression::gzip ? "gunzip -k {}" : "zstd -dk {}";
  if (is_token_file(name)) {
    return facts_of(DataKind::unreadable,
                    {"compressed tokens, which are read in any order", unpack, {}}, path);
  }
  if (find_compression(head) != Compression::none) {
    return facts_of(DataKind::unreadable, {"compressed twice", unpack, {}}, path);
  }
  DataFacts facts = inspect_content(path, name, head, text_key);
  facts.compression = compression;
  return facts;
}

}  // namespace tandem
