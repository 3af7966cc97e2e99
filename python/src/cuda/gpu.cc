// GPU ranks in a build with CUDA.
#include "../gpu.h"

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <utility>

#include "codec/cuda/encode.h"
#include "collectives/cuda/uncompressed_nccl.h"
#include "comm/device/gpu_communicator.h"
#include "core/cuda/current_device.h"
#include "core/cuda/graph.h"
#include "tandem/collectives.h"
#include "tandem/cuda.h"

namespace tandem::python {
namespace {

cudaStream_t stream_from(StreamNumber number) {
  return reinterpret_cast<cudaStream_t>(number);
}

bool is_default(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy;
}

// Owners of streams, for ranks that share a GPU: a stream used by two ranks would serialize their
// calls, which wait for each other.
class StreamOwners {
 public:
  void claim(cudaStream_t stream, const gpu::GpuShare* rank, std::string_view what) {
    const std::lock_guard lock(mutex_);
    const auto [at, is_new] = owners_.try_emplace(stream, rank);
    if (is_new || at->second == rank) return;
    throw InvalidArgument(fmt::format(
        "{}: the current stream {:#x} is another rank's of this GPU: expected one that only this "
        "rank uses, as the ranks wait for each other",
        what, reinterpret_cast<StreamNumber>(stream)));
  }
  void release(const gpu::GpuShare* rank) {
    const std::lock_guard lock(mutex_);
    std::erase_if(owners_, [&](const auto& each) { return each.second == rank; });
  }

 private:
  std::mutex mutex_;
  std::map<cudaStream_t, const gpu::GpuShare*> owners_;
};
StreamOwners stream_owners;

class Rank final : public GpuRank {
 public:
  explicit Rank(gpu::GpuCommunicator& comm) : comm_(comm), local_(comm.stream()) {
    if (comm_.shares_gpu()) stream_owners.claim(local_, &comm_.share(), "Comm");
  }
  ~Rank() override {
    if (comm_.shares_gpu()) stream_owners.release(&comm_.share());
  }

  int device() const override { return comm_.device(); }
  StreamNumber stream() const override { return reinterpret_cast<StreamNumber>(local_); }
  bool shares_gpu() const override { return comm_.shares_gpu(); }

  void enter() override { guard_.emplace(comm_); }
  void leave() noexcept override { guard_.reset(); }

  void follow(StreamNumber callers, std::string_view what) override {
    const cudaStream_t stream = stream_from(callers);
    if (stream == local_) return;
    if (comm_.shares_gpu() && is_default(stream)) {
      throw InvalidArgument(fmt::format(
          "{}: the current stream is CUDA's default stream, which all ranks that share this GPU "
          "have: expected one of this rank's own, as tandem.run sets for a framework that is "
          "imported before, such as torch.cuda.Stream()",
          what));
    }
    if (comm_.shares_gpu()) stream_owners.claim(stream, &comm_.share(), what);
    if (uses_callers_stream_) return move_to(stream);
    produced_.record(stream);
    produced_.block(local_);
  }
  void use_callers_stream() override { uses_callers_stream_ = true; }
  void lead(StreamNumber callers) override {
    const cudaStream_t stream = stream_from(callers);
    if (stream == local_) return;
    done_.record(local_);
    done_.block(stream);
  }

  void copy(void* to, const void* from, size_t bytes) override {
    gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, local_), "copy");
  }
  void synchronize() override { comm_.synchronize(); }
  void check() override { comm_.check_device(); }
  void exchange(std::span<const RankMessage> messages) override {
    gpu::grouped(comm_, [&] {
      for (const RankMessage& each : messages) {
        each.sends ? tandem::send(comm_, each.data, each.peer)
                   : tandem::recv(comm_, each.data, each.peer);
      }
    });
  }

 private:
  /// A stream under capture cannot wait for work outside its graph: whoever captures has waited.
  void move_to(cudaStream_t stream) {
    if (gpu::capture_of(stream) == gpu::capture_of(local_)) {
      produced_.record(local_);
      produced_.block(stream);
    }
    comm_.set_stream(stream);
    local_ = stream;
  }

  gpu::GpuCommunicator& comm_;
  cudaStream_t local_;
  bool uses_callers_stream_ = false;
  gpu::Event produced_, done_;
  std::optional<GpuGuard> guard_;
};

void require_message(const char* op, const Wire& wire, const Tensor& values,
                     const Tensor& message) {
  gpu::require_encodable_on_gpu(op, wire, values.dtype());  // a lossless message is not checked
  gpu::check_message(op, wire, values, message.as<std::byte>());
  const size_t needed = wire.bytes(values.elements(), values.dtype());
  if (message.device() == values.device() && message.bytes() >= needed) return;
  throw InvalidArgument(
      fmt::format("{}: message {} on cuda:{}: expected {} bytes on cuda:{}, where the values are",
                  op, message.describe(), message.device().index, needed, values.device().index));
}

}  // namespace

std::unique_ptr<GpuRank> gpu_rank_of(Communicator& comm) {
  if (!comm.on_gpu()) return nullptr;
  return std::make_unique<Rank>(gpu::as_gpu(comm));
}

bool is_captured(StreamNumber stream) {
  return gpu::is_captured(stream_from(stream));
}

void encode_on_gpu(const Wire& wire, const Tensor& values, const Tensor& message,
                   StreamNumber stream) {
  require_message("encode", wire, values, message);
  const gpu::CurrentDevice current(values.device().index);
  gpu::launch_encode(wire, values, message.as<std::byte>(), stream_from(stream));
}

void decode_on_gpu(const Wire& wire, const Tensor& message, const Tensor& values,
                   StreamNumber stream) {
  require_message("decode", wire, values, message);
  const gpu::CurrentDevice current(values.device().index);
  gpu::launch_decode(wire, message.as<std::byte>(), values, stream_from(stream));
}

}  // namespace tandem::python
