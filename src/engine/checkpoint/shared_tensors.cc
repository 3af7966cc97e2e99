#include "engine/checkpoint/shared_tensors.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include "core/cpu/tasks.h"
#include "core/host_copy.h"
#include "core/system/machine.h"
#include "engine/parallel/collective_check.h"
#include "tandem/collectives.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kHashWidth = 32;

/// Unique identifier of this file across all runs.
std::string new_mark() {
  std::random_device random;
  return content_hash(fmt::format("{} {} {} {}", random(), random(), ::getpid(),
                                  std::chrono::steady_clock::now().time_since_epoch().count()));
}

/// Byte tensor for send or recv; const data is not modified.
Tensor byte_tensor(const void* data, size_t bytes) {
  return Tensor(const_cast<void*>(data), DType::u8, {int64_t(bytes)});
}

}  // namespace

SharedTensors::SharedTensors(Communicator& ranks, const std::string& path, const Specs& specs,
                             const std::map<std::string, std::string>& metadata)
    : ranks_(ranks), path_(path), tensors_(specs.size()) {
  for (const SafetensorsWriter::Spec& spec : specs) {
    dtypes_.push_back(spec.dtype);
    uint64_t bytes = size_of(spec.dtype);
    for (const int64_t extent : spec.shape) bytes *= uint64_t(extent);
    bytes_ += bytes;
  }
  const std::string mark = on_rank_zero(ranks, "creating a file", [&] {
    file_.emplace(path, specs, metadata);
    std::string text = new_mark();
    file_->mark(text);
    return text;
  });
  if (ranks.rank() != 0) {
    try {
      SafetensorsWriter found(path, specs, metadata, SafetensorsWriter::Open::join);
      if (found.is_marked(mark)) file_ = std::move(found);
    } catch (const IoError&) {  // different folder: rank 0 writes for this rank
    }
  }
  const std::string host = file_ ? boot_id() + '.' : "";  // empty: it does not see the file
  const auto all = ranks.exchange(std::as_bytes(std::span(host)), "who sees a file");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) {
      ranks_without_path_.push_back(int(rank));
    } else if (all[rank] != all[0]) {
      has_several_hosts_ = true;
    }
  }
}

std::optional<Share> SharedTensors::share() const {
  if (!file_) return std::nullopt;
  return Share{ranks_.rank() - int(std::ranges::lower_bound(ranks_without_path_, ranks_.rank()) -
                                   ranks_without_path_.begin()),
               ranks_.size() - int(ranks_without_path_.size())};
}

void SharedTensors::write_here(const Slice& slice, const Tensor& tensor) {
  const std::span values = host_values(tensor);
  const auto index = size_t(slice.tensor);
  const uint64_t begin = uint64_t(slice.begin) * size_of(dtypes_[index]);
  if (dtypes_[index] == DType::f32) return file_->write(index, begin, std::as_bytes(values));
  std::vector<BFloat16> rounded(values.size());
  std::ranges::transform(values, rounded.begin(), BFloat16::from_float);
  file_->write(index, begin, std::as_bytes(std::span<const BFloat16>(rounded)));
}

void SharedTensors::send_slice(const Slice& slice, const Tensor& values) {
  send(ranks_, byte_tensor(&slice, sizeof slice), 0);
  if (slice.count > 0) send(ranks_, values, 0);
}

void SharedTensors::receive_slices(int source) {
  std::vector<float> values;
  while (true) {
    Slice slice{};
    recv(ranks_, byte_tensor(&slice, sizeof slice), source);
    if (slice.count == 0) return;
    values.resize(size_t(slice.count));
    const Tensor received = Tensor::of(std::span(values), {slice.count});
    recv(ranks_, received, source);
    try {
      if (error_.empty()) write_here(slice, received);
    } catch (const IoError& error) {
      error_ = error.what();  // the sender continues
    }
  }
}

/// Sends the parts of ranks that do not see the file to rank 0.
void SharedTensors::forward_slices(const std::function<void(const Write&)>& for_each_slice) {
  const DiskDeadline longer(ranks_);
  if (!file_) {
    for_each_slice([this](size_t tensor, int64_t begin, const Tensor& values) {
      const int64_t count = values.elements();
      if (count > 0) send_slice({int64_t(tensor), begin, count}, values);
    });
    send_slice({}, {});
  }
  if (ranks_.rank() == 0) {
    for (const int source : ranks_without_path_) receive_slices(source);
  }
}

/// Each rank that sees the file hashes an equal part of it, in whole tensors.
void SharedTensors::share_hashes() {
  const auto texts = on_every_rank(ranks_, "hashes of a file", bytes_, [&] {
    std::vector<size_t> hashed;
    for (size_t i = 0; file_ && i < tensors_; ++i) {
      const uint64_t begin = file_->tensor_offset(0);
      if (share()->has(file_->tensor_offset(i) - begin, file_->tensor_offset(tensors_) - begin)) {
        hashed.push_back(i);
      }
    }
    std::string hashes(hashed.size() * kHashWidth, '0');
    cpu::parallel_tasks(int64_t(hashed.size()), [&](int64_t i) {
      file_->tensor_hash(hashed[size_t(i)])
          .copy(hashes.data() + size_t(i) * kHashWidth, kHashWidth);
    });
    return hashes;
  });
  size_t next = 0;
  for (const std::string& text : texts) {
    for (size_t at = 0; at < text.size(); at += kHashWidth) {
      if (file_) file_->set_hash(next, text.substr(at, kHashWidth));
      ++next;
    }
  }
}

std::string SharedTensors::fill(const std::function<void(const Write&)>& for_each_slice) {
  on_every_rank(ranks_, "writing a file", bytes_, [&] {
    if (!file_) return std::string();
    for_each_slice([this](size_t tensor, int64_t begin, const Tensor& values) {
      const int64_t count = values.elements();
      if (count > 0) write_here({int64_t(tensor), begin, count}, values);
    });
    return std::string();
  });
  forward_slices(for_each_slice);
  on_every_rank(ranks_, "writing a file", bytes_, [&] {
    if (!error_.empty()) throw IoError(error_);
    if (file_ && has_several_hosts_) file_->sync();  // others would read older bytes
    return std::string();
  });
  share_hashes();
  return on_rank_zero(ranks_, "completing a file",
                      [&] { return file_->finish(has_several_hosts_); });
}

void SharedTensors::sync() {
  on_every_rank(ranks_, "syncing a file", bytes_, [&] {
    if (file_) file_->sync();  // a rank's writes may be in a cache of its own
    return std::string();
  });
}

}  // namespace tandem
