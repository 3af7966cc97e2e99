#include "core/cuda/share.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "core/cuda/common_stream.h"
#include "core/cuda/driver.h"
#include "core/cuda/graph.h"
#include "core/system/log.h"

namespace tandem::gpu {
namespace {

constexpr unsigned kGreenVersion = 12050;  // first CUDA version with all of these functions
constexpr int kSmStep = 8;                 // green contexts have multiples of this many SMs

// Copies within a GPU, and a stream's signals, run on SMs: a rank's grids leave some of its SMs
// free, or a kernel that waits for a copy would prevent it from running.
int left_for_grids(int sms) {
  return sms - (sms >= 16 ? 4 : 2);
}

template <typename Function>
Function green_function(const char* name) {
  return driver_function<Function>(name, kGreenVersion);
}

int device_sms(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  return count;
}

// SMs of the green context current in this thread, fewer than the device's.
int context_sms(int device) {
  const int all = device_sms(device);
  CUcontext context = nullptr;
  if (driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent")(&context) != CUDA_SUCCESS ||
      !context) {
    return all;
  }
  try {
    CUdevResource sms{};
    const auto get = green_function<decltype(&cuCtxGetDevResource)>("cuCtxGetDevResource");
    if (get(context, &sms, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) return all;
    return std::min(all, int(sms.sm.smCount));
  } catch (const Unsupported&) {
    return all;
  }
}

struct Green {
  CUgreenCtx context;
  int sms;
};

// Counts the streams of all ranks that share GPUs, including a default stream each: streams beyond
// the number of hardware queues may wait for another rank.
void count_stream() {
  constexpr int kQueues = 32;
  static std::atomic<int> made = 0;
  if (++made != kQueues + 1) return;
  log_message(LogLevel::info,
              "ranks that share a GPU have more streams than it has hardware queues, " +
                  std::to_string(kQueues) + ": one may wait for another's until the deadline");
}

std::vector<Green> split(int device, int num_shares) {
  const int each = device_sms(device) / num_shares / kSmStep * kSmStep;
  if (each == 0) {
    throw Unsupported("one_gpu: " + std::to_string(num_shares) + " ranks on a GPU of " +
                      std::to_string(device_sms(device)) + " SMs: expected " +
                      std::to_string(kSmStep) + " SMs a rank at least");
  }
  check(cudaFree(nullptr), "make the device's context");
  CUdevResource whole{}, rest{};
  check_driver(green_function<decltype(&cuDeviceGetDevResource)>("cuDeviceGetDevResource")(
                   device, &whole, CU_DEV_RESOURCE_TYPE_SM),
               "cuDeviceGetDevResource");
  std::vector<CUdevResource> groups{size_t(num_shares)};
  unsigned made = 0;
  // Prefer coscheduled SMs, unless this GPU has too few of them: the disabled SMs differ between
  // GPUs.
  for (const unsigned flags : {0u, unsigned(CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING)}) {
    made = unsigned(num_shares);
    check_driver(
        green_function<decltype(&cuDevSmResourceSplitByCount)>("cuDevSmResourceSplitByCount")(
            groups.data(), &made, &whole, &rest, flags, unsigned(each)),
        "cuDevSmResourceSplitByCount");
    if (int(made) >= num_shares) break;
  }
  if (int(made) < num_shares) {
    throw Unsupported("one_gpu: " + std::to_string(num_shares) + " ranks: this GPU's SMs make " +
                      std::to_string(made) + " shares of " + std::to_string(each));
  }
  std::vector<Green> all;
  for (CUdevResource& group : groups) {
    CUdevResourceDesc description{};
    check_driver(green_function<decltype(&cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc")(
                     &description, &group, 1),
                 "cuDevResourceGenerateDesc");
    count_stream();
    Green green{nullptr, int(group.sm.smCount)};
    check_driver(green_function<decltype(&cuGreenCtxCreate)>("cuGreenCtxCreate")(
                     &green.context, description, device, CU_GREEN_CTX_DEFAULT_STREAM),
                 "cuGreenCtxCreate");
    all.push_back(green);
  }
  return all;
}

// Default pool that keeps freed memory: returning it to the system would take time during a run.
cudaMemPool_t keeping_pool(int device) {
  cudaMemPool_t pool = nullptr;
  check(cudaDeviceGetDefaultMemPool(&pool, device), "the device's memory pool");
  uint64_t keep = std::numeric_limits<uint64_t>::max();
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
        "the device's memory pool");
  // Ranks that share a GPU share the pool. Memory freed by one rank after a kernel that waits for
  // another must not make the other's stream wait for that kernel.
  int never = 0;
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &never),
        "the device's memory pool");
  return pool;
}

// Memory that is never freed, since that would wait for the device, but reused, by size.
class CachedMemory {
 public:
  void* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto& cached = free_[bytes];
    if (cached.empty()) return nullptr;
    void* memory = cached.back();
    cached.pop_back();
    return memory;
  }
  void put_back(void* memory, size_t bytes) {
    const std::lock_guard lock(mutex_);
    free_[bytes].push_back(memory);
  }

 private:
  std::mutex mutex_;
  std::map<size_t, std::vector<void*>> free_;
};
CachedMemory cached_on_host, cached_on_device;

// Stream memory operations (write, wait) do not accept pool memory.
constexpr size_t kMaxCached = size_t(1) << 20, kMinCached = 4096;

bool is_cached(size_t bytes) {
  return bytes <= kMaxCached;
}
size_t cached_bytes(size_t bytes) {
  return std::max(std::bit_ceil(bytes), kMinCached);
}

// Allows allocation during a caller's capture. Allocations are on their own stream, so none enters
// the graph.
class ConcurrentCapture {
 public:
  ConcurrentCapture() {
    check(cudaThreadExchangeStreamCaptureMode(&mode_), "allocate while a call is captured");
  }
  ~ConcurrentCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ConcurrentCapture(const ConcurrentCapture&) = delete;
  ConcurrentCapture& operator=(const ConcurrentCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Idle streams of green contexts, kept for reuse: a new stream might map to a hardware queue of
// another rank's stream.
class IdleStreams {
 public:
  cudaStream_t take(const void* green, Priority priority) {
    const std::lock_guard lock(mutex_);
    auto& spare = free_[{green, priority}];
    if (spare.empty()) return nullptr;
    const cudaStream_t stream = spare.back();
    spare.pop_back();
    return stream;
  }
  /// Keeps `stream` unless it is being captured; returns whether it was kept.
  bool put_back(const void* green, cudaStream_t stream) {
    int priority = 0;
    cudaStreamCaptureStatus captured{};
    if (cudaStreamIsCapturing(stream, &captured) != cudaSuccess ||
        captured != cudaStreamCaptureStatusNone ||
        cudaStreamGetPriority(stream, &priority) != cudaSuccess) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    free_[{green, priority < 0 ? Priority::high : Priority::normal}].push_back(stream);
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<const void*, Priority>, std::vector<cudaStream_t>> free_;
};
IdleStreams idle_streams;

thread_local std::shared_ptr<GpuShare> current;

}  // namespace

GpuShare::GpuShare(int device, int sms, void* green) : device_(device), sms_(sms), green_(green) {
  if (!green_) return;
  keeping_pool(device);
  memory_ = prompt_stream(*this);
}

GpuShare::~GpuShare() {
  if (memory_) release_stream(memory_);
}

std::shared_ptr<GpuShare> GpuShare::whole(int device) {
  return std::shared_ptr<GpuShare>(new GpuShare(device, context_sms(device), nullptr));
}

std::shared_ptr<GpuShare> GpuShare::share_of(int device, int num_shares, int index) {
  if (num_shares == 1) return whole(device);
  static std::mutex mutex;
  static std::map<std::pair<int, int>, std::vector<Green>> made;
  const std::lock_guard lock(mutex);
  auto& all = made[{device, num_shares}];
  if (all.empty()) all = split(device, num_shares);
  const Green& green = all.at(size_t(index));
  return std::shared_ptr<GpuShare>(new GpuShare(device, left_for_grids(green.sms), green.context));
}

int GpuShare::blocks(int maximum, int per_sm) const {
  return std::clamp(sms_ * per_sm, 1, maximum);
}

int GpuShare::clusters(int on_device, int size) const {
  return std::max(std::min(on_device, sms_ / size), on_device > 0 ? 1 : 0);
}

cudaStream_t GpuShare::make_stream(Priority priority) {
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "stream priorities");
  const int number = priority == Priority::high ? highest : lowest;
  cudaStream_t stream = nullptr;
  if (!green_) {
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, number), "create a stream");
    return stream;
  }
  if ((stream = idle_streams.take(green_, priority))) {
    adopt_stream(stream);
    return stream;
  }
  static const auto make =
      green_function<decltype(&cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate");
  check_driver(make(&stream, static_cast<CUgreenCtx>(green_), CU_STREAM_NON_BLOCKING, number),
               "cuGreenCtxStreamCreate");
  count_stream();
  adopt_stream(stream);
  return stream;
}

void GpuShare::destroy_stream(cudaStream_t stream) {
  release_stream(stream);
  if (!green_ || !idle_streams.put_back(green_, stream)) cudaStreamDestroy(stream);
}

void GpuShare::adopt_stream(cudaStream_t stream) {
  if (!green_) return;
  const std::lock_guard lock(mutex_);
  streams_.push_back(stream);
}

void GpuShare::release_stream(cudaStream_t stream) {
  if (!green_) return;
  const std::lock_guard lock(mutex_);
  const auto at = std::ranges::find(streams_, stream);
  if (at != streams_.end()) streams_.erase(at);
  cudaStreamCaptureStatus captured{};
  const bool known = cudaStreamIsCapturing(stream, &captured) == cudaSuccess;
  // Memory in use by this stream may be freed next.
  if (known && captured == cudaStreamCaptureStatusNone) cudaStreamSynchronize(stream);
}

void GpuShare::synchronize() {
  if (!green_) {
    check(cudaDeviceSynchronize(), "wait for the device");
    return;
  }
  std::vector<cudaStream_t> streams;
  {
    const std::lock_guard lock(mutex_);
    streams = streams_;
  }
  for (const cudaStream_t stream : streams) {
    if (!is_captured(stream)) check(cudaStreamSynchronize(stream), "wait for a stream");
  }
}

std::byte* GpuShare::allocate(size_t bytes) {
  void* memory = nullptr;
  const std::string what = "allocate " + std::to_string(bytes) + " bytes of device memory";
  if (!green_) {
    check(cudaMalloc(&memory, bytes ? bytes : 1), what.c_str());
    check(cudaMemset(memory, 0, bytes), "clear device memory");
    check(cudaDeviceSynchronize(), "clear device memory");
    return static_cast<std::byte*>(memory);
  }
  const ConcurrentCapture concurrent;
  if (is_cached(bytes)) {
    memory = cached_on_device.take(cached_bytes(bytes));
    if (!memory) check(cudaMalloc(&memory, cached_bytes(bytes)), what.c_str());
  } else {
    check(cudaMallocAsync(&memory, bytes, memory_), what.c_str());
  }
  check(cudaMemsetAsync(memory, 0, bytes, memory_), "clear device memory");
  check(cudaStreamSynchronize(memory_), "clear device memory");
  return static_cast<std::byte*>(memory);
}

void GpuShare::free(std::byte* memory, size_t bytes) {
  if (!green_) {
    cudaFree(memory);
    return;
  }
  try {
    synchronize();
  } catch (const Error&) {
    return;  // the device failed: nothing can be freed
  }
  if (is_cached(bytes)) {
    cached_on_device.put_back(memory, cached_bytes(bytes));
  } else {
    cudaFreeAsync(memory, memory_);
  }
}

void* GpuShare::allocate_host(size_t bytes) {
  void* memory = green_ ? cached_on_host.take(bytes) : nullptr;
  if (memory) return memory;
  check(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
        "allocate mapped host memory");
  return memory;
}

void GpuShare::free_host(void* memory, size_t bytes) {
  if (!green_) {
    cudaFreeHost(memory);
    return;
  }
  try {
    synchronize();
  } catch (const Error&) {
    return;
  }
  free_idle_host(memory, bytes);
}

void GpuShare::free_idle_host(void* memory, size_t bytes) {
  if (green_) {
    cached_on_host.put_back(memory, bytes);
  } else {
    cudaFreeHost(memory);
  }
}

const std::shared_ptr<GpuShare>& this_share() {
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  if (!current || (current->alone() && current->device() != device)) {
    current = GpuShare::whole(device);
  }
  return current;
}

UseShare::UseShare(std::shared_ptr<GpuShare> share)
    : before_(std::exchange(current, std::move(share))) {}

UseShare::~UseShare() {
  current = std::move(before_);
}

}  // namespace tandem::gpu
