// Common base of GPU ranks: a stream, peers whose memory its kernels address, signals, deadlines
// and a share of the GPU's SMs. The transports derive from it: `nccl` (one GPU per rank) and
// `one_gpu` (several ranks on one GPU). Small host-side agreement (`exchange`) goes through a
// control communicator of CPU ranks.
//
// SymmetricBuffer::local and ::peer are device addresses. `put` copies on its own stream after the
// work enqueued on `stream()`; `wait` blocks the host, whereas operators wait on the device
// (signal_kernels.h), as `enqueue_wait` does. Device-side waits that time out are reported by
// `check_device` and `synchronize`.
//
// Aborts arrive through the control communicator. The host checks for one while it waits, also for
// copies (core/cuda/stream_watch.h), and then ends the device's waits too; a host that waits for
// CUDA by other calls sees them ended by the deadline.
//
// Ranks that do not reach each other's memory (several nodes, or teams of at most kMaxGpus): `peer`
// is nullptr, `put` throws Unsupported if copies do not reach either, and operators let NCCL move
// the data, or its substitute (overlap/gather/cuda/multi_node.h).
//
// The communicators of a rank, the world's and its splits, give up together: a kernel of one that
// waits for a lost rank would keep the memory of all others from being freed.
//
// In run_gpus ranks end together: the last step of a communicator's end is collective. A rank of a
// World ends independently (end_alone) and shares ownership of the world state; a split owns its
// parent.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <typeindex>
#include <vector>

#include "comm/agreement.h"
#include "comm/device/device_signal.h"
#include "comm/device/link_pacer.h"
#include "comm/world/world_state.h"
#include "core/cuda/common_stream.h"
#include "core/cuda/handles.h"
#include "core/cuda/stream_watch.h"
#include "observe/progress_words.h"
#include "tandem/communicator.h"

namespace tandem::gpu {

class GpuCommunicator;

/// Transport's allocation of one symmetric buffer on this rank. Freed on destruction, when no GPU
/// uses it any more.
class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;
};
using OwnedSymmetric = std::unique_ptr<SymmetricMemory>;

/// Memory of one rank in a symmetric allocation; nullptr if copies do not reach it.
struct RankMemory {
  std::byte* memory = nullptr;
  uint64_t* signals = nullptr;
};

/// This rank's memory of a symmetric allocation and the addresses of the peers'. Destruction
/// is not collective and waits for no rank: the memory is freed when all ranks have destroyed
/// theirs and call `allocate`, or when the communicator is destroyed, which it must not outlive.
class GpuBuffer final : public SymmetricBuffer {
 public:
  /// `memories`: memory of all ranks. Kernels address them if all ranks reach each other.
  GpuBuffer(GpuCommunicator& comm, size_t bytes, int signals, OwnedSymmetric memory,
            std::vector<RankMemory> memories);
  ~GpuBuffer() override;
  std::byte* peer(int rank) const override;
  /// Addresses for kernels; valid only if all ranks reach each other.
  const PeerTable& table() const { return table_; }
  /// Addresses for copies.
  const RankMemory& rank_memory(int rank) const { return memories_[size_t(rank)]; }

 private:
  GpuCommunicator& comm_;
  OwnedSymmetric memory_;
  uint64_t number_;
  std::vector<RankMemory> memories_;
  PeerTable table_;
};

class GpuCommunicator : public Communicator, private StreamChecks {
 public:
  ~GpuCommunicator() override;

  bool on_gpu() const final { return true; }
  std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) final;
  void put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source, size_t bytes,
           int signal, uint64_t epoch) final;
  void flush() final;
  uint64_t read_signal(const SymmetricBuffer& buffer, int signal) const final;
  void wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch, const WaitSite& site) final;
  void enqueue_wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                    const WaitSite& site) final;
  void abort(const std::string& reason) final;
  /// Ends what this rank's communicators wait for on the GPU, which then frees memory without the
  /// other ranks. All later calls fail.
  void give_up() const;
  /// give_up by another thread than the rank's, after an abort, which the rank's next wait reports.
  void give_up_for_abort() const;
  /// Whether give_up was called for one of them, or a wait on the GPU has failed. Any thread.
  bool has_given_up() const;
  std::unique_ptr<Communicator> split(int color, int key) final;
  /// CPU ranks of the same order (comm/world/host_ranks.h). Collective.
  std::unique_ptr<Communicator> split_on_host();
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) final;

  int device() const { return share_->device(); }
  /// Share of this rank in its GPU.
  GpuShare& share() const { return *share_; }
  /// Shared ownership of that share, for a thread that works for this rank but is not its own
  /// (UseShare).
  const std::shared_ptr<GpuShare>& share_owner() const { return share_; }
  /// Whether every rank reaches every other's memory.
  bool one_node() const { return one_node_; }
  /// Whether kernels can atomically add to words in every other rank's memory; true for one rank.
  bool has_peer_atomics() const { return peer_atomics_; }
  /// Stream on which operators of this rank enqueue; this rank's own stream unless set.
  cudaStream_t stream() const { return stream_; }
  void set_stream(cudaStream_t stream);
  /// Pacer of an emulated link, null if there is none. It also delays what this rank sends by other
  /// means than kernels with a PeerTable.
  LinkPacer* link_pacer() const { return link_pacer_ ? link_pacer_->get() : nullptr; }
  /// Emulated link; null if there is none.
  const EmulatedLink* emulated_link() const { return link_pacer_ ? &link_pacer_->link() : nullptr; }
  Deadline device_deadline() const { return {record_.get(), uint64_t(deadline_s_ * 1e9)}; }

  /// Throws Timeout, Mismatch or Aborted if a device-side wait of this rank failed.
  void check_device() const;
  /// Throws Aborted, or the Timeout of this rank's device, if a rank has called `abort` or was
  /// lost.
  void look_for_abort() const;
  /// Blocks until `stream()` is empty, then as `check_device`. Throws Timeout if it does not become
  /// empty.
  void synchronize() const;
  /// Whether other ranks enqueue on the same GPU: a CUDA call that blocks one rank then blocks all.
  virtual bool shares_gpu() const { return false; }
  /// Whether no other rank, of this process or another, has the same GPU.
  virtual bool has_whole_gpu() const { return !shares_gpu(); }
  /// Enqueues `step` of a collective call, within an Enqueueing. `step` may first be captured.
  template <typename Step>
  void enqueue(const Step& step) {
    if (shares_gpu()) prepare(step);
    step();
  }
  /// Loads and allocates what `step` needs, on all ranks that share the GPU, before any of them
  /// enqueues the current call.
  virtual void prepare(const std::function<void()>& step) { static_cast<void>(step); }
  /// Collective: runs `step` on every rank and throws on all of them if one failed, so that no rank
  /// proceeds to the next collective step and waits there.
  void agree_on(std::string_view what, const std::function<void()>& step);
  /// Collective: elementwise maximum over the ranks.
  std::vector<double> slowest(std::span<const double> local);

  template <typename T>
  bool has_attached() const {
    return attached_.contains(std::type_index(typeid(T)));
  }
  /// Returns the one T of this communicator; `make` creates it (a new T) on first use.
  template <typename T, typename Make>
  T& attached(Make make) {
    auto& slot = attached_[std::type_index(typeid(T))];
    if (!slot) slot = std::shared_ptr<T>(make());
    return *static_cast<T*>(slot.get());
  }

 protected:
  /// Collective over `control`, which must outlive this; `world` or the parent of a split may own
  /// it. Uses the calling thread's GPU share.
  explicit GpuCommunicator(Communicator& control, std::shared_ptr<WorldState> world = nullptr);

  /// Collective; the arguments are the same on all ranks.
  virtual std::shared_ptr<GpuBuffer> do_allocate(size_t bytes, int signals) = 0;
  /// Collective: a communicator of the same transport over `control`.
  virtual std::unique_ptr<GpuCommunicator> do_split(Communicator& control) = 0;
  /// Aborts the transport's pending work, which has no deadline. Called after a failure.
  virtual void do_give_up() const {}
  /// Returns when the work aborted by the last do_give_up has ended, or at `until`.
  virtual void await_give_up(std::chrono::steady_clock::time_point until) const {
    static_cast<void>(until);
  }
  /// Takes symmetric memory that ranks could not agree to free, as one of them failed.
  virtual void abandon(std::vector<OwnedSymmetric> left) = 0;

  /// Called by the transport's constructor; `link_pacer` outlives this.
  void use(const OwnedLinkPacer& link_pacer);
  /// Called first by the transport's destructor: frees what is attached and all symmetric memory.
  /// Any thread whose current device is this GPU.
  void end();
  /// World state; null in run_gpus.
  const std::shared_ptr<WorldState>& world_state() const { return world_; }
  /// Called when this rank has enqueued its part of a call whose kernels wait for other ranks.
  /// Ranks that share a GPU return from the call together (one_gpu_communicator.h); others return
  /// at once.
  virtual void enqueued() noexcept {}

  /// Positions of the ranks' host threads, as far as this process knows them: "rank 1: read <
  /// copy".
  virtual std::string where_ranks_are() const { return ""; }
  /// Records the ranks' positions for later errors, if this host has waited long for other ranks.
  void note_late(double waited_s) const;

  bool failed() const { return failed_; }
  Communicator& control_;
  bool one_node_ = true, peer_atomics_ = true;

 private:
  /// Communicators of one rank: the world's and its splits.
  struct Family {
    std::mutex mutex;
    std::vector<const GpuCommunicator*> members;
    std::atomic<bool> is_unreported = false;  ///< ended by another thread than the rank's
  };
  void join(std::shared_ptr<Family> family);
  void leave_family();
  void synchronize(cudaStream_t stream, const char* what) const;
  void check_wait(const char* what, double waited_s) const override;
  void check_end() const override;
  /// Throws the error of an abort for which another thread gave up, once.
  void report_end() const;
  void check_so_far(const char* what, double waited_s) const;
  void note_wait(const char* what) const;
  void note_wait_end() const;
  struct LateRank {
    int rank = -1;         ///< -1: `position` names it
    std::string position;  ///< the call that it is in instead
  };
  LateRank find_late_rank() const;
  void end_with_ranks();
  void end_alone();
  void free_retired();
  void end_device_waits() const;
  template <typename Call>
  auto giving_up_if_aborted(const Call& call) const;

  // Destroyed last.
  std::shared_ptr<WorldState> world_;
  std::shared_ptr<Communicator> parent_;         // split: parent, if it has owners
  std::shared_ptr<Communicator> owned_control_;  // split: its control communicator
  int open_calls_ = 0;
  std::shared_ptr<SymmetricBuffer>
      aborts_;  // buffer of `control_`; waiting for epoch 0 reports an abort
  std::shared_ptr<GpuShare> share_;
  std::shared_ptr<Family> family_;
  mutable std::atomic<bool> failed_ = false;  // any thread may abort
  mutable double unreported_s_ = 0;  // of a host's wait until a device-side wait reported an error
  mutable std::optional<WaitActivity> waiting_;  // of the host, for a stream
  mutable std::string where_;  // positions of the ranks' threads, recorded once one was late
  Retired<OwnedSymmetric> retired_;
  Mapped<ErrorRecord> record_;
  Mapped<uint64_t> seen_;
  Stream initial_stream_;
  CommonStream polls_{Common::prompt};
  std::optional<CommonStream> copies_;  // created by the first put
  Event produced_;
  cudaStream_t stream_;
  const OwnedLinkPacer* link_pacer_ = nullptr;
  std::optional<PacedCopies> paced_puts_;
  std::map<std::type_index, std::shared_ptr<void>> attached_;
  std::optional<StreamWatch> watch_;  // of stream_

  friend class GpuBuffer;
  friend class Enqueueing;
};

/// Scope around what a collective call enqueues, including nested calls; calls `enqueued` at its
/// end.
class Enqueueing {
 public:
  explicit Enqueueing(GpuCommunicator& comm) : comm_(comm) { ++comm_.open_calls_; }
  ~Enqueueing() {
    if (--comm_.open_calls_ == 0) comm_.enqueued();
  }
  Enqueueing(const Enqueueing&) = delete;
  Enqueueing& operator=(const Enqueueing&) = delete;

 private:
  GpuCommunicator& comm_;
};

/// Whether calls may be replayed as CUDA graphs, whose branches need separate hardware queues.
bool replays_graphs();

/// Casts `comm` to a GPU rank. Throws InvalidArgument if its transport has CPU ranks.
GpuCommunicator& as_gpu(Communicator& comm);

}  // namespace tandem::gpu
