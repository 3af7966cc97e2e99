#include "train/shared_tensors.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include "tandem/collectives.h"
#include "tandem/error.h"
#include "train/collective_check.h"

namespace tandem {
namespace {

constexpr size_t kHashWidth = 32;

/// Of this file, of all that any run has ever made.
std::string new_mark() {
  std::random_device random;
  return content_hash(fmt::format("{} {} {} {}", random(), random(), ::getpid(),
                                  std::chrono::steady_clock::now().time_since_epoch().count()));
}

std::string text_of(const std::vector<std::byte>& blob) {
  return {reinterpret_cast<const char*>(blob.data()), blob.size()};
}

/// To be sent or received; neither changes what is const.
Tensor bytes_of(const void* data, size_t bytes) {
  return Tensor(const_cast<void*>(data), DType::u8, {int64_t(bytes)});
}

}  // namespace

SharedTensors::SharedTensors(Communicator& ranks, const std::string& path, const Specs& specs,
                             const std::map<std::string, std::string>& metadata)
    : ranks_(ranks), path_(path), tensors_(specs.size()) {
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
    } catch (const IoError&) {  // another's folder: rank 0 writes for this rank
    }
  }
  const char sees = file_.has_value();
  const auto all = ranks.exchange(std::as_bytes(std::span(&sees, 1)), "who sees a file");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank][0] == std::byte{0}) blind_.push_back(int(rank));
  }
}

void SharedTensors::write(size_t tensor, int64_t begin, std::span<const float> values) {
  const Part part{int64_t(tensor), begin, int64_t(values.size())};
  if (values.empty()) return;
  file_ ? write_here(part, values) : send_part(part, values);
}

void SharedTensors::write_here(const Part& part, std::span<const float> values) {
  if (!error_.empty()) return;
  try {
    file_->write(size_t(part.tensor), uint64_t(part.begin) * sizeof(float), std::as_bytes(values));
  } catch (const IoError& error) {
    error_ = error.what();
  }
}

void SharedTensors::send_part(const Part& part, std::span<const float> values) {
  send(ranks_, bytes_of(&part, sizeof part), 0);
  if (!values.empty()) send(ranks_, bytes_of(values.data(), values.size_bytes()), 0);
}

void SharedTensors::receive_parts(int source) {
  std::vector<float> values;
  while (true) {
    Part part{};
    recv(ranks_, bytes_of(&part, sizeof part), source);
    if (part.count == 0) return;
    values.resize(size_t(part.count));
    recv(ranks_, bytes_of(values.data(), values.size() * sizeof(float)), source);
    write_here(part, values);
  }
}

void SharedTensors::share_errors(std::string_view what) {
  const auto all = ranks_.exchange(std::as_bytes(std::span(error_)), what);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) throw IoError(fmt::format("rank {}: {}", rank, text_of(all[rank])));
  }
}

/// Each of the ranks that see the file reads an equal part of it, in whole tensors.
void SharedTensors::share_hashes() {
  const int readers = ranks_.size() - int(blind_.size());
  const int reader =
      ranks_.rank() - int(std::ranges::lower_bound(blind_, ranks_.rank()) - blind_.begin());
  std::string hashes;
  const auto reader_of = [&](size_t tensor) {
    const uint64_t at = file_->place_of(tensor) - file_->place_of(0);
    const uint64_t all = std::max<uint64_t>(1, file_->place_of(tensors_) - file_->place_of(0));
    return std::min(readers - 1, int(at * uint64_t(readers) / all));
  };
  try {
    for (size_t i = 0; file_ && i < tensors_; ++i) {
      if (reader_of(i) == reader) hashes += file_->hash_of(i);
    }
  } catch (const IoError& error) {
    error_ = error.what();
  }
  share_errors("hashes of a file");
  size_t next = 0;
  for (const auto& blob : ranks_.exchange(std::as_bytes(std::span(hashes)), "hashes of a file")) {
    const std::string text = text_of(blob);
    for (size_t at = 0; at < text.size(); at += kHashWidth) {
      if (file_) file_->set_hash(next, text.substr(at, kHashWidth));
      ++next;
    }
  }
}

std::string SharedTensors::finish() {
  if (!file_) send_part({}, {});
  if (ranks_.rank() == 0) {
    for (const int source : blind_) receive_parts(source);
  }
  try {
    if (file_ && error_.empty()) file_->sync();
  } catch (const IoError& error) {
    error_ = error.what();
  }
  share_errors("writing a file");
  share_hashes();
  return on_rank_zero(ranks_, "completing a file", [&] { return file_->finish(); });
}

}  // namespace tandem
