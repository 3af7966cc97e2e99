#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/formats/safetensors.h"
#include "core/system/file_descriptor.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHashWidth = 32;
constexpr size_t kWriteback = size_t{8} << 20;

std::string_view code_of(DType type) {
  switch (type) {
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::i32:
      return "I32";
    case DType::u8:
      return "U8";
    case DType::e4m3:
      return "F8_E4M3";
  }
  return "?";
}

size_t bytes_of(const SafetensorsWriter::Spec& spec) {
  size_t bytes = size_of(spec.dtype);
  for (const int64_t extent : spec.shape) bytes *= size_t(extent);
  return bytes;
}

}  // namespace

class SafetensorsWriter::Impl {
 public:
  Impl(std::string path, std::vector<Spec> specs, std::map<std::string, std::string> metadata,
       Open open)
      : path_(std::move(path)),
        specs_(std::move(specs)),
        metadata_(std::move(metadata)),
        is_hashed_(specs_.size()),
        file_(path_, O_NOFOLLOW | (open == Open::create ? O_RDWR | O_CREAT | O_TRUNC : O_RDWR)) {
    for (const Spec& spec : specs_) metadata_["xxh3:" + spec.name] = std::string(kHashWidth, '0');
    offsets_.push_back(header().size());
    for (const Spec& spec : specs_) offsets_.push_back(offsets_.back() + bytes_of(spec));
    if (open == Open::create && ::ftruncate(file_.get(), off_t(offsets_.back())) != 0) {
      throw_errno(path_, "cannot write");
    }
  }

  void write(std::span<const std::byte> bytes) {
    if (next_ == specs_.size() || bytes.size() != bytes_of(specs_[next_])) {
      throw InvalidArgument(fmt::format("{}: tensor {}: {} bytes: expected {}", path_, next_,
                                        bytes.size(),
                                        next_ == specs_.size() ? 0 : bytes_of(specs_[next_])));
    }
    set_hash(next_, content_hash(bytes));
    write(next_++, 0, bytes);
  }

  void write(size_t tensor, uint64_t begin, std::span<const std::byte> bytes) {
    const size_t whole = tensor < specs_.size() ? bytes_of(specs_[tensor]) : 0;
    if (begin > whole || bytes.size() > whole - begin) {
      throw InvalidArgument(fmt::format("{}: tensor {}: bytes [{}, {}) of {}", path_, tensor, begin,
                                        begin + bytes.size(), whole));
    }
    for (size_t done = 0; done < bytes.size();) {
      const size_t count = std::min(kWriteback, bytes.size() - done);
      write_at(file_.get(), path_, bytes.data() + done, count, offsets_[tensor] + begin + done);
      begin_writeback(offsets_[tensor] + begin + done, count);
      done += count;
    }
  }

  void set_hash(size_t tensor, const std::string& hash) {
    metadata_.at("xxh3:" + specs_.at(tensor).name) = hash;
    is_hashed_[tensor] = true;
  }

  std::string tensor_hash(size_t tensor) const {
    const FileDescriptor file = open_for_reading(path_);
    return content_hash(file.get(), path_, offsets_.at(tensor), bytes_of(specs_.at(tensor)));
  }

  void sync() { sync_file(file_.get(), path_); }

  std::string finish(bool syncs) {
    const auto hashed = size_t(std::count(is_hashed_.begin(), is_hashed_.end(), true));
    if (hashed != specs_.size()) {
      throw InvalidArgument(
          fmt::format("{}: {} of {} tensors written", path_, hashed, specs_.size()));
    }
    const std::string text = header();
    write_at(file_.get(), path_, text.data(), text.size(), 0);
    if (syncs) sync();
    return content_hash(text);
  }

  void mark(const std::string& text) { write_at(file_.get(), path_, text.data(), text.size(), 0); }
  bool is_marked(const std::string& text) const {
    std::string found(text.size(), '\0');
    return read_at(file_.get(), path_, found.data(), found.size(), 0) == text.size() &&
           found == text;
  }
  uint64_t tensor_offset(size_t tensor) const { return offsets_.at(tensor); }

 private:
  /// Lets the disk write adjacent bytes while others are still written and hashed: fsync would
  /// begin with all of them. Only a hint, whose errors fsync reports.
  void begin_writeback(uint64_t begin, size_t count) {
    if (begin != dirty_end_) dirty_begin_ = begin;
    dirty_end_ = begin + count;
    if (dirty_end_ - dirty_begin_ < kWriteback) return;
    ::sync_file_range(file_.get(), off_t(dirty_begin_), off_t(dirty_end_ - dirty_begin_),
                      SYNC_FILE_RANGE_WRITE);
    dirty_begin_ = dirty_end_;
  }
  std::string header() const {
    nlohmann::json root;
    root["__metadata__"] = metadata_;
    size_t offset = 0;
    for (const Spec& spec : specs_) {
      root[spec.name] = {{"dtype", code_of(spec.dtype)},
                         {"shape", spec.shape},
                         {"data_offsets", {offset, offset + bytes_of(spec)}}};
      offset += bytes_of(spec);
    }
    std::string text = root.dump();
    text.append((kAlignment - (8 + text.size()) % kAlignment) % kAlignment, ' ');
    std::string length(8, '\0');
    for (size_t i = 0; i < 8; ++i) length[i] = char(text.size() >> (8 * i));
    return length + text;
  }

  std::string path_;
  std::vector<Spec> specs_;
  std::map<std::string, std::string> metadata_;
  std::vector<bool> is_hashed_;
  FileDescriptor file_;
  std::vector<uint64_t> offsets_;
  size_t next_ = 0;
  uint64_t dirty_begin_ = 0, dirty_end_ = 0;  // adjacent bytes not passed to begin_writeback's call
};

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<Spec> specs,
                                     std::map<std::string, std::string> metadata, Open open)
    : impl_(std::make_unique<Impl>(std::move(path), std::move(specs), std::move(metadata), open)) {}
SafetensorsWriter::~SafetensorsWriter() = default;
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  impl_->write(bytes);
}
void SafetensorsWriter::write(size_t tensor, uint64_t begin, std::span<const std::byte> bytes) {
  impl_->write(tensor, begin, bytes);
}
void SafetensorsWriter::set_hash(size_t tensor, const std::string& hash) {
  impl_->set_hash(tensor, hash);
}
std::string SafetensorsWriter::tensor_hash(size_t tensor) const {
  return impl_->tensor_hash(tensor);
}
void SafetensorsWriter::sync() {
  impl_->sync();
}
std::string SafetensorsWriter::finish(bool syncs) {
  return impl_->finish(syncs);
}
void SafetensorsWriter::mark(const std::string& text) {
  impl_->mark(text);
}
bool SafetensorsWriter::is_marked(const std::string& text) const {
  return impl_->is_marked(text);
}
uint64_t SafetensorsWriter::tensor_offset(size_t tensor) const {
  return impl_->tensor_offset(tensor);
}

}  // namespace tandem
