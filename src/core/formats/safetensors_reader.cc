#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "core/cpu/tasks.h"
#include "core/formats/safetensors.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Bytes of a file from which its tensors are hashed by several threads, and of a slice of a tensor
/// that one thread reads.
constexpr uint64_t kParallelBytes = uint64_t{64} << 20;
constexpr size_t kReadSlice = size_t{4} << 20;
/// Elements that one thread converts to f32, and those that it reads at once.
constexpr size_t kConvertSlice = size_t{1} << 20, kConverted = size_t{1} << 15;

}  // namespace

int64_t SafetensorsEntry::elements() const {
  return int64_t((end - begin) / size_of(dtype));
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), file_(open_for_reading(path)) {
  const uint64_t bytes = file_size(file_.get(), path);
  std::vector<std::byte> head(size_t(std::min<uint64_t>(bytes, 8)));
  head.resize(read_at(file_.get(), path, head.data(), head.size(), 0));
  if (head.size() == 8) {
    head.resize(size_t(
        std::min(bytes, 8 + std::min(safetensors_header_bytes(head), kMaxSafetensorsHeaderBytes))));
    head.resize(read_at(file_.get(), path, head.data(), head.size(), 0));
  }
  header_ = parse_safetensors_header(head, bytes, path);
  header_hash_ = content_hash(std::span(std::as_const(head)).first(size_t(header_.data_begin)));
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto name_at = [&](size_t i) -> std::string_view { return header_.entries[i].name; };
  const auto at = std::ranges::lower_bound(header_.by_name, name, {}, name_at);
  return at == header_.by_name.end() || name_at(*at) != name ? nullptr : &header_.entries[*at];
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
  const uint64_t first = header_.data_begin + entry.begin + offset;
  std::atomic<bool> is_cut = false;
  cpu::parallel_tasks(int64_t(out.size() / kReadSlice) + 1, [&](int64_t slice) {
    const size_t begin = size_t(slice) * kReadSlice,
                 count = std::min(kReadSlice, out.size() - begin);
    const size_t got = read_at(file_.get(), path_, out.data() + begin, count, first + begin);
    if (got < count) is_cut = true;
  });
  if (is_cut) reject_tensor(path_, entry.name, "the file was cut while it was read");
}

void SafetensorsFile::check_range(const SafetensorsEntry& entry, int64_t begin,
                                  size_t count) const {
  if (begin >= 0 && begin <= entry.elements() && int64_t(count) <= entry.elements() - begin) return;
  throw InvalidArgument(fmt::format("{}: tensor '{}': elements [{}, {}) of {}", path_, entry.name,
                                    begin, begin + int64_t(count), entry.elements()));
}

void SafetensorsFile::read(const SafetensorsEntry& entry, int64_t begin, const Tensor& out) const {
  check_range(entry, begin, size_t(out.elements()));
  if (entry.dtype != out.dtype() || !out.contiguous()) {
    throw InvalidArgument(fmt::format("{}: tensor '{}' is {}: expected it contiguous, to read {}",
                                      path_, entry.name, name_of(entry.dtype), out.describe()));
  }
  read_tensor(entry, uint64_t(begin) * size_of(entry.dtype), {out.as<std::byte>(), out.bytes()});
}

void SafetensorsFile::read_codes(const SafetensorsEntry& entry, int64_t begin,
                                 std::span<float> out) const {
  check_range(entry, begin, out.size());
  std::vector<Float8E4M3> codes(out.size());
  read_tensor(entry, uint64_t(begin), std::as_writable_bytes(std::span(codes)));
  std::ranges::transform(codes, out.begin(), &Float8E4M3::to_float);
}

void SafetensorsFile::read_f32(const SafetensorsEntry& entry, int64_t begin,
                               std::span<float> out) const {
  check_range(entry, begin, out.size());
  const uint64_t offset = uint64_t(begin) * size_of(entry.dtype);
  const auto convert = [&]<typename Half>(Half) {
    cpu::parallel_tasks(int64_t(out.size() / kConvertSlice) + 1, [&](int64_t slice) {
      std::array<Half, kConverted> source;  // in a core's caches
      const size_t first = size_t(slice) * kConvertSlice;
      const size_t end = std::min(out.size(), first + kConvertSlice);
      for (size_t at = first; at < end; at += kConverted) {
        const std::span some = std::span(source).first(std::min(kConverted, end - at));
        read_tensor(entry, offset + at * sizeof(Half), std::as_writable_bytes(some));
        for (size_t i = 0; i < some.size(); ++i) out[at + i] = some[i].to_float();
      }
    });
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
    case DType::e4m3:  // not a value without its scale
      break;
  }
  throw IoError(fmt::format("{}: tensor '{}' is {}: expected f32, bf16 or f16", path_, entry.name,
                            name_of(entry.dtype)));
}

std::string SafetensorsFile::hash(const SafetensorsEntry& entry) const {
  return content_hash(file_.get(), path_, header_.data_begin + entry.begin,
                      entry.end - entry.begin);
}

void SafetensorsFile::verify(bool require_hashes, const Share& share) const {
  const uint64_t bytes = header_.entries.empty() ? 0 : header_.entries.back().end;
  std::vector<const SafetensorsEntry*> checked;
  for (const auto& entry : header_.entries) {
    if (share.has(entry.begin, bytes)) checked.push_back(&entry);
  }
  const auto verify_one = [&](int64_t i) { verify(*checked[size_t(i)], require_hashes); };
  const auto count = int64_t(checked.size());
  if (bytes >= kParallelBytes) return cpu::parallel_tasks(count, verify_one);
  for (int64_t i = 0; i < count; ++i) verify_one(i);
}

void SafetensorsFile::verify(const SafetensorsEntry& entry, bool require_hashes) const {
  const auto expected = header_.metadata.find("xxh3:" + entry.name);
  if (expected == header_.metadata.end()) {
    if (require_hashes) reject_tensor(path_, entry.name, "has no content hash");
    return;
  }
  const std::string found = hash(entry);
  if (found == expected->second) return;
  reject_tensor(path_, entry.name,
                fmt::format("content hash {}: expected {} (the file is damaged)", found,
                            printable(expected->second)));
}

std::string SafetensorsFile::identity() const {
  const bool covered = std::all_of(
      header_.entries.begin(), header_.entries.end(),
      [&](const auto& entry) { return header_.metadata.contains("xxh3:" + entry.name); });
  return covered ? header_hash_
                 : content_hash(file_.get(), path_, 0, file_size(file_.get(), path_));
}

}  // namespace tandem
