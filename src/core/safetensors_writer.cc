#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "core/file_descriptor.h"
#include "core/safetensors.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kAlignment = 64;

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
  Impl(std::string path, std::vector<Spec> specs, std::map<std::string, std::string> metadata)
      : path_(std::move(path)),
        specs_(std::move(specs)),
        metadata_(std::move(metadata)),
        file_(path_, O_WRONLY | O_CREAT | O_TRUNC, 0644) {
    // Hashes have a fixed width, so the header's length is known before they are.
    for (const Spec& spec : specs_) metadata_["xxh3:" + spec.name] = std::string(32, '0');
    offset_ = header().size();
  }

  void write(std::span<const std::byte> bytes) {
    if (next_ == specs_.size() || bytes.size() != bytes_of(specs_[next_])) {
      throw InvalidArgument(fmt::format("{}: tensor {}: {} bytes: expected {}", path_, next_,
                                        bytes.size(),
                                        next_ == specs_.size() ? 0 : bytes_of(specs_[next_])));
    }
    metadata_["xxh3:" + specs_[next_].name] = content_hash(bytes);
    write_at(file_.get(), path_, bytes.data(), bytes.size(), offset_);
    offset_ += bytes.size();
    ++next_;
  }

  std::string finish() {
    if (next_ != specs_.size()) {
      throw InvalidArgument(
          fmt::format("{}: {} of {} tensors written", path_, next_, specs_.size()));
    }
    const std::string text = header();
    write_at(file_.get(), path_, text.data(), text.size(), 0);
    if (::fsync(file_.get()) != 0) throw_errno(path_, "cannot sync");
    return content_hash(text);
  }

 private:
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
  FileDescriptor file_;
  size_t next_ = 0;
  uint64_t offset_ = 0;
};

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<Spec> specs,
                                     std::map<std::string, std::string> metadata)
    : impl_(std::make_unique<Impl>(std::move(path), std::move(specs), std::move(metadata))) {}
SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  impl_->write(bytes);
}
std::string SafetensorsWriter::finish() {
  return impl_->finish();
}

}  // namespace tandem
