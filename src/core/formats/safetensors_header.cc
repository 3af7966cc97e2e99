// SAX parser of a safetensors header: memory use is bounded by the tensors it names, whatever the
// JSON.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>

#include "core/formats/safetensors.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using nlohmann::json;
constexpr const char* kMetadata = "__metadata__";

std::optional<DType> dtype_of(const std::string& code) {
  if (code == "F32") return DType::f32;
  if (code == "BF16") return DType::bf16;
  if (code == "F16") return DType::f16;
  if (code == "I32") return DType::i32;
  if (code == "U8") return DType::u8;
  if (code == "F8_E4M3") return DType::e4m3;
  return std::nullopt;
}

/// SAX handler, called by nlohmann::json for every value.
class HeaderReader : public json::json_sax_t {
 public:
  HeaderReader(const std::string& file, uint64_t data_bytes, SafetensorsHeader& header)
      : file_(file), data_bytes_(data_bytes), header_(header) {}

  bool null() override { reject(); }
  bool boolean(bool) override { reject(); }
  bool number_integer(json::number_integer_t) override { reject(); }
  bool number_float(json::number_float_t, const std::string&) override { reject(); }
  bool binary(json::binary_t&) override { reject(); }
  bool number_unsigned(json::number_unsigned_t value) override {
    if (depth_ != 3) reject();
    if (field_ == "shape") {
      if (value > uint64_t(INT64_MAX)) reject_tensor(file_, entry_.name, "shape: too large");
      entry_.shape.push_back(int64_t(value));
    } else {
      if (num_offsets_ == 2) reject_offsets();
      (num_offsets_++ == 0 ? entry_.begin : entry_.end) = value;
    }
    return true;
  }
  bool string(std::string& value) override {
    if (depth_ == 2 && in_metadata_) {
      header_.metadata[field_] = std::move(value);
      return true;
    }
    if (depth_ != 2 || field_ != "dtype") reject();
    const auto known = dtype_of(value);
    if (!known) {
      reject_tensor(
          file_, entry_.name,
          fmt::format("dtype {}: expected F32, BF16, F16, F8_E4M3, I32 or U8", printable(value)));
    }
    entry_.dtype = *known;
    has_dtype_ = true;
    return true;
  }
  bool key(std::string& value) override {
    if (depth_ == 1) {
      entry_ = {};
      entry_.name = std::move(value);
      in_metadata_ = entry_.name == kMetadata;
      has_dtype_ = has_shape_ = false;
      num_offsets_ = 0;
    } else {
      field_ = std::move(value);
    }
    return true;
  }
  bool start_object(size_t) override {
    if (depth_ > 1) reject();
    ++depth_;
    return true;
  }
  bool end_object() override {
    if (--depth_ == 1 && !in_metadata_) add_entry();
    return true;
  }
  bool start_array(size_t) override {
    if (depth_ != 2 || in_metadata_ || (field_ != "shape" && field_ != "data_offsets")) reject();
    if (field_ == "shape") {
      has_shape_ = true;
      entry_.shape.clear();
    } else {
      num_offsets_ = 0;
    }
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(size_t, const std::string&, const json::exception&) override { reject_json(); }

 private:
  [[noreturn]] void reject_json() const {
    throw IoError(file_ + ": the safetensors header is not a JSON object");
  }
  [[noreturn]] void reject_offsets() const {
    reject_tensor(file_, entry_.name, "data_offsets: expected [begin, end]");
  }
  /// Throws for a value of the wrong kind at its position.
  [[noreturn]] void reject() const {
    if (depth_ == 0) reject_json();
    if (in_metadata_) {
      throw IoError(depth_ == 1 ? fmt::format("{}: {}: expected an object", file_, kMetadata)
                                : fmt::format("{}: {} '{}': expected a string", file_, kMetadata,
                                              printable(field_)));
    }
    if (depth_ == 1)
      reject_tensor(file_, entry_.name, "expected an object with dtype, shape and data_offsets");
    if (depth_ == 3) reject_tensor(file_, entry_.name, field_ + ": expected a whole number");
    if (field_ == "dtype") reject_tensor(file_, entry_.name, "dtype: expected a string");
    if (field_ == "shape") reject_tensor(file_, entry_.name, "shape: expected an array");
    if (field_ == "data_offsets") reject_offsets();
    reject_tensor(
        file_, entry_.name,
        fmt::format("unknown field {}: expected dtype, shape and data_offsets", printable(field_)));
  }

  void add_entry() {
    if (!has_dtype_) reject_tensor(file_, entry_.name, "dtype: expected a string");
    if (!has_shape_) reject_tensor(file_, entry_.name, "shape: expected an array");
    if (num_offsets_ != 2) reject_offsets();
    if (entry_.begin > entry_.end || entry_.end > data_bytes_) {
      reject_tensor(
          file_, entry_.name,
          fmt::format("data_offsets [{}, {}): the file holds {} bytes of data (truncated?)",
                      entry_.begin, entry_.end, data_bytes_));
    }
    uint64_t bytes = size_of(entry_.dtype);
    for (const int64_t extent : entry_.shape) {
      if (extent != 0 && __builtin_mul_overflow(bytes, uint64_t(extent), &bytes))
        reject_tensor(file_, entry_.name, "shape: too large");
    }
    if (std::ranges::count(entry_.shape, 0) > 0) bytes = 0;
    if (bytes != entry_.end - entry_.begin) {
      reject_tensor(
          file_, entry_.name,
          fmt::format("shape [{}] of {} does not fill its {} bytes", fmt::join(entry_.shape, ", "),
                      name_of(entry_.dtype), entry_.end - entry_.begin));
    }
    header_.entries.push_back(std::move(entry_));
  }

  const std::string& file_;
  const uint64_t data_bytes_;
  SafetensorsHeader& header_;
  int depth_ = 0;  ///< 1: names, 2: fields, 3: numbers of a field
  bool in_metadata_ = false, has_dtype_ = false, has_shape_ = false;
  int num_offsets_ = 0;
  std::string field_;
  SafetensorsEntry entry_;
};

/// Checks that the entries tile the data and that names are unique.
void check_entries(const SafetensorsHeader& header, uint64_t data_bytes, const std::string& file) {
  uint64_t end = 0;
  for (const auto& entry : header.entries) {
    if (entry.begin != end) {
      reject_tensor(
          file, entry.name,
          fmt::format("starts at byte {} of the data: expected {} (holes and overlaps are invalid)",
                      entry.begin, end));
    }
    end = entry.end;
  }
  if (end != data_bytes) {
    throw IoError(
        fmt::format("{}: {} bytes of data: the header describes {}", file, data_bytes, end));
  }
  for (size_t i = 1; i < header.by_name.size(); ++i) {
    const std::string& name = header.entries[header.by_name[i]].name;
    if (name == header.entries[header.by_name[i - 1]].name)
      reject_tensor(file, name, "is named twice");
  }
}

uint64_t header_bytes_of(std::span<const std::byte> head, uint64_t file_bytes,
                         const std::string& file) {
  if (file_bytes < 8 || head.size() < 8) {
    throw IoError(fmt::format("{}: {} bytes: too short for a safetensors file", file, file_bytes));
  }
  const uint64_t length = safetensors_header_bytes(head);
  if (length > kMaxSafetensorsHeaderBytes || length > file_bytes - 8 || length > head.size() - 8) {
    throw IoError(
        fmt::format("{}: header length {} in a file of {} bytes: not a safetensors file, or "
                    "truncated",
                    file, length, file_bytes));
  }
  return length;
}

}  // namespace

void reject_tensor(const std::string& file, const std::string& tensor, std::string_view what) {
  throw IoError(fmt::format("{}: tensor '{}': {}", file, printable(tensor), what));
}

uint64_t safetensors_header_bytes(std::span<const std::byte> head) {
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= uint64_t(head[i]) << (8 * i);
  return length;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, uint64_t file_bytes,
                                           const std::string& file) {
  const uint64_t length = header_bytes_of(head, file_bytes, file);
  SafetensorsHeader header;
  header.data_begin = 8 + length;
  const uint64_t data_bytes = file_bytes - header.data_begin;
  const auto* text = reinterpret_cast<const char*>(head.data()) + 8;
  HeaderReader reader(file, data_bytes, header);
  json::sax_parse(text, text + length, &reader);
  std::ranges::sort(header.entries, {}, [](const auto& e) { return std::pair(e.begin, e.end); });
  header.by_name.resize(header.entries.size());
  std::iota(header.by_name.begin(), header.by_name.end(), size_t{0});
  std::ranges::sort(header.by_name, {},
                    [&](size_t i) -> const std::string& { return header.entries[i].name; });
  check_entries(header, data_bytes, file);
  return header;
}

}  // namespace tandem
