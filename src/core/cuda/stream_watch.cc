#include "core/cuda/stream_watch.h"

#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/cuda/check.h"

namespace tandem::gpu {
namespace {

std::mutex watches_mutex;
std::multimap<cudaStream_t, const StreamChecks*> watches;

std::vector<const StreamChecks*> watchers_of(cudaStream_t stream) {
  const std::lock_guard lock(watches_mutex);
  std::vector<const StreamChecks*> all;
  const auto [begin, end] = watches.equal_range(stream);
  for (auto at = begin; at != end; ++at) all.push_back(at->second);
  return all;
}

void await(cudaStream_t stream, const char* what, const std::function<cudaError_t()>& query) {
  const std::vector<const StreamChecks*> watchers = watchers_of(stream);
  poll(what, query, [&](double waited_s) {
    for (const StreamChecks* checks : watchers) checks->check_wait(what, waited_s);
  });
  for (const StreamChecks* checks : watchers) checks->check_end();
}

}  // namespace

StreamWatch::StreamWatch(cudaStream_t stream, const StreamChecks& checks)
    : stream_(stream), checks_(checks) {
  const std::lock_guard lock(watches_mutex);
  watches.emplace(stream, &checks);
}

StreamWatch::~StreamWatch() {
  const std::lock_guard lock(watches_mutex);
  const auto [begin, end] = watches.equal_range(stream_);
  for (auto at = begin; at != end; ++at) {
    if (at->second != &checks_) continue;
    watches.erase(at);
    return;
  }
}

void poll(const char* what, const std::function<cudaError_t()>& query,
          const std::function<void(double)>& check_so_far) {
  constexpr int kSpins = 10000;  // a few milliseconds: longer than most waits
  const auto begin = std::chrono::steady_clock::now();
  for (int spin = 0;; ++spin) {
    const cudaError_t state = query();
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) check(state, what);
    if (spin < kSpins) continue;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    check_so_far(waited.count());
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void await_stream(cudaStream_t stream, const char* what) {
  await(stream, what, [&] { return cudaStreamQuery(stream); });
}

void await_event(cudaEvent_t event, cudaStream_t stream, const char* what) {
  await(stream, what, [&] { return cudaEventQuery(event); });
}

}  // namespace tandem::gpu
