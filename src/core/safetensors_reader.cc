#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/json.h"
#include "core/printable.h"
#include "core/safetensors.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using nlohmann::json;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

std::optional<DType> dtype_of(const std::string& code) {
  if (code == "F32") return DType::f32;
  if (code == "BF16") return DType::bf16;
  if (code == "F16") return DType::f16;
  if (code == "I32") return DType::i32;
  if (code == "U8") return DType::u8;
  if (code == "F8_E4M3") return DType::e4m3;
  return std::nullopt;
}

[[noreturn]] void bad(const std::string& file, const std::string& tensor, std::string_view what) {
  throw IoError(fmt::format("{}: tensor '{}': {}", file, printable(tensor), what));
}

uint64_t whole_number(const json& value, const std::string& file, const std::string& tensor,
                      std::string_view what) {
  if (!value.is_number_unsigned()) {
    bad(file, tensor, fmt::format("{}: expected a whole number", what));
  }
  return value.get<uint64_t>();
}

SafetensorsEntry parse_entry(const std::string& name, const json& value, uint64_t data_bytes,
                             const std::string& file) {
  SafetensorsEntry entry;
  entry.name = name;
  if (!value.is_object()) bad(file, name, "expected an object with dtype, shape and data_offsets");
  const auto dtype = value.find("dtype"), shape = value.find("shape"),
             offsets = value.find("data_offsets");
  if (dtype == value.end() || !dtype->is_string()) bad(file, name, "dtype: expected a string");
  const auto known = dtype_of(dtype->get<std::string>());
  if (!known) {
    bad(file, name,
        fmt::format("dtype {}: expected F32, BF16, F16, I32 or U8",
                    printable(dtype->get<std::string>())));
  }
  entry.dtype = *known;
  if (shape == value.end() || !shape->is_array()) bad(file, name, "shape: expected an array");
  if (offsets == value.end() || !offsets->is_array() || offsets->size() != 2) {
    bad(file, name, "data_offsets: expected [begin, end]");
  }
  entry.begin = whole_number((*offsets)[0], file, name, "data_offsets");
  entry.end = whole_number((*offsets)[1], file, name, "data_offsets");
  if (entry.begin > entry.end || entry.end > data_bytes) {
    bad(file, name,
        fmt::format("data_offsets [{}, {}): the file holds {} bytes of data (truncated?)",
                    entry.begin, entry.end, data_bytes));
  }
  uint64_t bytes = size_of(entry.dtype);
  bool zero = false;
  for (const json& extent : *shape) {
    const uint64_t n = whole_number(extent, file, name, "shape");
    zero |= n == 0;
    if (n > uint64_t(INT64_MAX) || (n != 0 && __builtin_mul_overflow(bytes, n, &bytes))) {
      bad(file, name, "shape: too large");
    }
    entry.shape.push_back(int64_t(n));
  }
  if ((zero ? 0 : bytes) != entry.end - entry.begin) {
    bad(file, name,
        fmt::format("shape [{}] of {} does not fill its {} bytes", fmt::join(entry.shape, ", "),
                    name_of(entry.dtype), entry.end - entry.begin));
  }
  return entry;
}

uint64_t length_in(std::span<const std::byte> head) {
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= uint64_t(head[i]) << (8 * i);
  return length;
}

uint64_t header_bytes_of(std::span<const std::byte> head, uint64_t file_bytes,
                         const std::string& file) {
  if (file_bytes < 8 || head.size() < 8) {
    throw IoError(fmt::format("{}: {} bytes: too short for a safetensors file", file, file_bytes));
  }
  const uint64_t length = length_in(head);
  if (length > kMaxHeaderBytes || length > file_bytes - 8 || length > head.size() - 8) {
    throw IoError(
        fmt::format("{}: header length {} in a file of {} bytes: not a safetensors file, or "
                    "truncated",
                    file, length, file_bytes));
  }
  return length;
}

}  // namespace

int64_t SafetensorsEntry::elements() const {
  return int64_t((end - begin) / size_of(dtype));
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, uint64_t file_bytes,
                                           const std::string& file) {
  const uint64_t length = header_bytes_of(head, file_bytes, file);
  const auto* text = reinterpret_cast<const char*>(head.data()) + 8;
  const json root = parse_json(std::string_view(text, size_t(length)));
  if (!root.is_object()) throw IoError(file + ": the safetensors header is not a JSON object");
  SafetensorsHeader header;
  header.data_begin = 8 + length;
  const uint64_t data_bytes = file_bytes - header.data_begin;
  for (const auto& [name, value] : root.items()) {
    if (name != "__metadata__") {
      header.entries.push_back(parse_entry(name, value, data_bytes, file));
      continue;
    }
    if (!value.is_object()) throw IoError(file + ": __metadata__: expected an object");
    for (const auto& [key, entry] : value.items()) {
      if (!entry.is_string()) {
        throw IoError(
            fmt::format("{}: __metadata__ '{}': expected a string", file, printable(key)));
      }
      header.metadata[key] = entry.get<std::string>();
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const auto& entry : header.entries) {
    if (entry.begin != end) {
      bad(file, entry.name,
          fmt::format("starts at byte {} of the data: expected {} (holes and overlaps are invalid)",
                      entry.begin, end));
    }
    end = entry.end;
  }
  if (end != data_bytes) {
    throw IoError(
        fmt::format("{}: {} bytes of data: the header describes {}", file, data_bytes, end));
  }
  return header;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), file_(open_for_reading(path)) {
  const uint64_t bytes = file_size(file_.get(), path);
  std::vector<std::byte> head(size_t(std::min<uint64_t>(bytes, 8)));
  head.resize(read_at(file_.get(), path, head.data(), head.size(), 0));
  if (head.size() == 8) {
    head.resize(size_t(std::min(bytes, 8 + std::min(length_in(head), kMaxHeaderBytes))));
    head.resize(read_at(file_.get(), path, head.data(), head.size(), 0));
  }
  header_ = parse_safetensors_header(head, bytes, path);
  header_hash_ = content_hash(std::span(std::as_const(head)).first(size_t(header_.data_begin)));
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto at = std::find_if(header_.entries.begin(), header_.entries.end(),
                               [&](const auto& entry) { return entry.name == name; });
  return at == header_.entries.end() ? nullptr : &*at;
}

const SafetensorsEntry& SafetensorsFile::require(std::string_view name,
                                                 std::span<const int64_t> shape) const {
  const SafetensorsEntry* entry = find(name);
  if (!entry) throw IoError(fmt::format("{}: tensor '{}' is missing", path_, name));
  if (!std::equal(shape.begin(), shape.end(), entry->shape.begin(), entry->shape.end())) {
    throw IoError(fmt::format("{}: tensor '{}' has shape [{}]: expected [{}]", path_, name,
                              fmt::join(entry->shape, ", "), fmt::join(shape, ", ")));
  }
  return *entry;
}

std::vector<std::byte> SafetensorsFile::data(const SafetensorsEntry& entry) const {
  std::vector<std::byte> bytes(size_t(entry.end - entry.begin));
  read_tensor(entry, 0, bytes);
  return bytes;
}

void SafetensorsFile::read_tensor(const SafetensorsEntry& entry, uint64_t offset,
                                  std::span<std::byte> out) const {
  const uint64_t begin = header_.data_begin + entry.begin + offset;
  const size_t got = read_at(file_.get(), path_, out.data(), out.size(), begin);
  if (got < out.size()) bad(path_, entry.name, "the file was cut while it was read");
}

void SafetensorsFile::read_f32(const SafetensorsEntry& entry, int64_t begin,
                               std::span<float> out) const {
  if (begin < 0 || begin > entry.elements() || int64_t(out.size()) > entry.elements() - begin) {
    throw InvalidArgument(fmt::format("{}: tensor '{}': elements [{}, {}) of {}", path_, entry.name,
                                      begin, begin + int64_t(out.size()), entry.elements()));
  }
  const uint64_t offset = uint64_t(begin) * size_of(entry.dtype);
  const auto convert = [&]<typename Half>(Half half) {
    std::vector<std::byte> source(2 * out.size());
    read_tensor(entry, offset, source);
    for (size_t i = 0; i < out.size(); ++i) {
      std::memcpy(&half.bits, source.data() + 2 * i, 2);
      out[i] = half.to_float();
    }
  };
  switch (entry.dtype) {
    case DType::f32:
      return read_tensor(entry, offset, std::as_writable_bytes(out));
    case DType::bf16:
      return convert(BFloat16{});
    case DType::f16:
      return convert(Float16{});
    case DType::i32:
    case DType::u8:
    case DType::e4m3:  // a value only together with its scale
      break;
  }
  throw IoError(fmt::format("{}: tensor '{}' is {}: expected f32, bf16 or f16", path_, entry.name,
                            name_of(entry.dtype)));
}

void SafetensorsFile::verify(bool require_hashes) const {
  for (const auto& entry : header_.entries) {
    const auto expected = header_.metadata.find("xxh3:" + entry.name);
    if (expected == header_.metadata.end()) {
      if (require_hashes) bad(path_, entry.name, "has no content hash");
      continue;
    }
    const std::string found =
        content_hash(file_.get(), path_, header_.data_begin + entry.begin, entry.end - entry.begin);
    if (found != expected->second) {
      bad(path_, entry.name,
          fmt::format("content hash {}: expected {} (the file is damaged)", found,
                      printable(expected->second)));
    }
  }
}

std::string SafetensorsFile::identity() const {
  const bool covered = std::all_of(
      header_.entries.begin(), header_.entries.end(),
      [&](const auto& entry) { return header_.metadata.contains("xxh3:" + entry.name); });
  return covered ? header_hash_
                 : content_hash(file_.get(), path_, 0, file_size(file_.get(), path_));
}

}  // namespace tandem
