// The `nccl` transport: each rank owns one GPU. Small host-side agreement (`exchange`) goes through
// a control communicator of CPU ranks, threads or mpi; device memory is symmetric NCCL windows that
// every GPU of the node addresses directly.
//
// SymmetricBuffer::local and ::peer are device addresses. `put` copies with the copy engine on a
// stream of its own after what is enqueued on `stream()`; `wait` blocks the host, operators wait on
// the device instead (signal_kernels.h). Device-side waits that give up are reported by
// `check_device` and `synchronize`.
//
// The control communicator tells aborts. The host looks for one where it waits, and then ends the
// device's waits too; a host that waits for CUDA by other calls finds them ended by the deadline.
//
// Ranks on several nodes reach only their own memory: `peer` is nullptr, `put` to another rank is
// Unsupported, and operators let NCCL move the data (overlap/cuda/across_nodes.h).
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <typeindex>

#include "comm/agreement.h"
#include "comm/gpu_place.h"
#include "comm/device/device_signal.h"
#include "comm/nccl/lsa_pointers.h"
#include "core/cuda/handles.h"
#include "tandem/communicator.h"

namespace tandem::gpu {

/// Throws DeviceError unless `code` is success.
void check(ncclResult_t code, const char* what);

/// Whether calls may be replayed as CUDA graphs, whose branches need hardware queues of their own.
bool replays_graphs();

/// Of one rank, and the peers' mappings of theirs where these are reached.
struct SymmetricMemory {
  std::byte* memory = nullptr;
  ncclWindow_t window = nullptr;
};
struct FreeSymmetric {
  const ncclComm_t* comm;  ///< none after a failure
  void operator()(SymmetricMemory* memory) const;
};
using OwnedSymmetric = std::unique_ptr<SymmetricMemory, FreeSymmetric>;

class GpuBuffer;

class GpuCommunicator final : public Communicator {
 public:
  /// Collective over `control`, which must outlive this. Uses GPU `device` of this process.
  GpuCommunicator(Communicator& control, int device);
  ~GpuCommunicator() override;

  std::string_view transport() const override { return "nccl"; }
  std::string link() const override;
  std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) override;
  void put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source, size_t bytes,
           int signal, uint64_t epoch) override;
  void flush() override;
  uint64_t read_signal(const SymmetricBuffer& buffer, int signal) const override;
  void wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
            const WaitSite& site) override;
  void abort(const std::string& reason) override;
  std::unique_ptr<Communicator> split(int color, int key) override;
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) override;

  int device() const { return device_; }
  /// Whether every rank's GPU reaches every other's memory.
  bool one_node() const { return one_node_; }
  /// Whether kernels can add to words in every other GPU's memory; of one rank: yes.
  bool has_peer_atomics() const { return peer_atomics_; }
  ncclComm_t nccl() const { return nccl_; }
  /// What operators of this rank enqueue on; this rank's own stream unless set.
  cudaStream_t stream() const { return stream_; }
  void set_stream(cudaStream_t stream) { stream_ = stream; }
  Watch watch() const { return {record_.get(), uint64_t(deadline_s_ * 1e9)}; }

  /// Throws Timeout or Aborted when a device-side wait of this rank gave up.
  void check_device() const;
  /// Blocks until `stream()` is empty; then as `check_device`. Throws Timeout when it does not end.
  void synchronize() const;
  /// Collective: the largest of the ranks' values, by element.
  std::vector<double> slowest(std::span<const double> mine);

  /// One T for as long as this communicator lives: what `make` returns (a new T) at first use.
  template <typename T, typename Make>
  T& attached(Make make) {
    auto& slot = attached_[std::type_index(typeid(T))];
    if (!slot) slot = std::shared_ptr<T>(make());
    return *static_cast<T*>(slot.get());
  }

 private:
  void synchronize(cudaStream_t stream, std::string_view what) const;
  void give_up() const;
  void agree_on_paths(std::span<const GpuPlace> places);
  void free_retired();
  void end_device_waits() const;
  void look_for_abort() const;
  template <typename Call>
  auto giving_up_if_aborted(const Call& call) const;

  Communicator& control_;
  std::unique_ptr<Communicator> owned_control_;  // of a split
  std::shared_ptr<SymmetricBuffer> aborts_;  // the control's: waiting for its epoch 0 tells of one
  int device_;
  bool one_node_ = true, peer_atomics_ = true;
  mutable std::atomic<bool> failed_ = false;  // any thread may abort
  mutable ncclComm_t nccl_ = nullptr;         // none after a failure
  Retired<OwnedSymmetric> retired_;
  Mapped<ErrorRecord> record_;
  Mapped<LsaAddresses> addresses_;
  Mapped<uint64_t> seen_;
  Stream own_stream_;
  Stream copies_{Priority::high};
  Stream polls_{Priority::high};
  Event produced_;
  cudaStream_t stream_;
  std::map<std::type_index, std::shared_ptr<void>> attached_;

  friend class GpuBuffer;
};

/// This rank's part of a symmetric allocation and the peers' addresses of theirs. Destroying it is
/// not collective and waits for nobody: its memory is freed when all ranks have destroyed theirs
/// and meet in `allocate`, or when the communicator is destroyed, which it must not outlive.
class GpuBuffer final : public SymmetricBuffer {
 public:
  GpuBuffer(GpuCommunicator& comm, size_t bytes, int signals);
  ~GpuBuffer() override;
  std::byte* peer(int rank) const override { return table_.memory[rank]; }
  const PeerTable& table() const { return table_; }

 private:
  void obtain(size_t total);
  void map_peers(size_t total);

  GpuCommunicator& comm_;
  OwnedSymmetric memory_;
  uint64_t number_ = 0;
  PeerTable table_;
};

/// The transport's own face of `comm`. Throws InvalidArgument when it is another transport.
GpuCommunicator& as_gpu(Communicator& comm);

}  // namespace tandem::gpu
