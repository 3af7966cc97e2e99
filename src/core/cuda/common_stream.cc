#include "core/cuda/common_stream.h"

#include <map>
#include <mutex>
#include <utility>

namespace tandem::gpu {
namespace {

Priority priority_of(Common which) {
  return which == Common::capture ? Priority::normal : Priority::high;
}

/// If ranks share a GPU, calls are captured on `side`, too, to save a stream per rank. So it has
/// the priority of captured kernels.
Common shared(Common which) {
  return which == Common::side ? Common::capture : which;
}

struct Made {
  cudaStream_t stream = nullptr;
  int users = 0;
};
// Keyed by share; every rank of every world has its own.
std::mutex made_mutex;
std::map<std::pair<const GpuShare*, Common>, Made> made;

cudaStream_t take(GpuShare& share, Common which) {
  if (share.alone()) return share.make_stream(priority_of(which));
  if (which == Common::prompt) return prompt_stream(share);
  const std::lock_guard lock(made_mutex);
  Made& one = made[{&share, shared(which)}];
  if (one.users == 0) {
    one.stream = share.make_stream(priority_of(shared(which)));
  } else {
    share.adopt_stream(one.stream);
  }
  ++one.users;
  return one.stream;
}

/// Removes a user; whether it was the last.
bool is_last(const GpuShare& share, Common which) {
  if (share.alone()) return true;
  if (which == Common::prompt) return false;
  const std::lock_guard lock(made_mutex);
  const auto at = made.find({&share, shared(which)});
  if (--at->second.users > 0) return false;
  made.erase(at);
  return true;
}

}  // namespace

// Created by the first green context that asks; lives as long as the process, as these do.
cudaStream_t prompt_stream(GpuShare& share) {
  static std::mutex mutex;
  static std::map<int, cudaStream_t> of_devices;
  const std::lock_guard lock(mutex);
  cudaStream_t& stream = of_devices[share.device()];
  if (stream) {
    share.adopt_stream(stream);
  } else {
    stream = share.make_stream(priority_of(Common::prompt));
  }
  return stream;
}

CommonStream::CommonStream(Common which)
    : share_(this_share()), which_(which), stream_(take(*share_, which)) {}

CommonStream::~CommonStream() {
  if (is_last(*share_, which_)) {
    share_->destroy_stream(stream_);
  } else {
    share_->release_stream(stream_);
  }
}

}  // namespace tandem::gpu
