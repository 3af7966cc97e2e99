// What every GPU rank is, whatever provides it: a stream, peers whose memory its kernels address,
// signals, deadlines and a share of the GPU's SMs. The transports derive from it: `nccl` (a GPU a
// rank) and `one_gpu` (several ranks on one GPU). Small host-side agreement (`exchange`) goes
// through a control communicator of CPU ranks.
//
// SymmetricBuffer::local and ::peer are device addresses. `put` copies on a stream of its own after
// what is enqueued on `stream()`; `wait` blocks the host, operators wait on the device instead
// (signal_kernels.h). Device-side waits that give up are reported by `check_device` and
// `synchronize`.
//
// The control communicator tells aborts. The host looks for one where it waits, and then ends the
// device's waits too; a host that waits for CUDA by other calls finds them ended by the deadline.
//
// Ranks that do not reach each other's memory (several nodes, or teams of at most kMaxGpus):
// `peer` is nullptr, `put` is Unsupported where copies do not reach either, and operators let NCCL
// move the data, or what stands in for it (overlap/contract/cuda/multi_node.h).
//
// In run_gpus ranks end together: the last step of a communicator's end is collective. A rank of a
// World ends alone (end_alone), holds what it stands on, and a split holds its parent.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <typeindex>
#include <vector>

#include "comm/agreement.h"
#include "comm/device/device_signal.h"
#include "comm/device/line.h"
#include "comm/held_world.h"
#include "core/cuda/common_stream.h"
#include "core/cuda/handles.h"
#include "tandem/communicator.h"

namespace tandem::gpu {

class GpuCommunicator;

/// What a transport has allocated for one symmetric buffer on this rank. Freed on destruction, when
/// nobody's GPU uses it any more.
class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;
};
using OwnedSymmetric = std::unique_ptr<SymmetricMemory>;

/// One rank's part of a symmetric allocation; nullptr where copies do not reach it.
struct SymmetricPart {
  std::byte* memory = nullptr;
  uint64_t* signals = nullptr;
};

/// This rank's part of a symmetric allocation and the peers' addresses of theirs. Destroying it is
/// not collective and waits for nobody: its memory is freed when all ranks have destroyed theirs
/// and meet in `allocate`, or when the communicator is destroyed, which it must not outlive.
class GpuBuffer final : public SymmetricBuffer {
 public:
  /// `parts`: of all ranks. Kernels address them where all ranks reach each other.
  GpuBuffer(GpuCommunicator& comm, size_t bytes, int signals, OwnedSymmetric memory,
            std::vector<SymmetricPart> parts);
  ~GpuBuffer() override;
  std::byte* peer(int rank) const override;
  /// What kernels address. Only of ranks that all reach each other.
  const PeerTable& table() const { return table_; }
  /// What copies address.
  const SymmetricPart& part(int rank) const { return parts_[size_t(rank)]; }

 private:
  GpuCommunicator& comm_;
  OwnedSymmetric memory_;
  uint64_t number_;
  std::vector<SymmetricPart> parts_;
  PeerTable table_;
};

class GpuCommunicator : public Communicator {
 public:
  ~GpuCommunicator() override;

  bool on_gpu() const final { return true; }
  std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) final;
  void put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source, size_t bytes,
           int signal, uint64_t epoch) final;
  void flush() final;
  uint64_t read_signal(const SymmetricBuffer& buffer, int signal) const final;
  void wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch, const WaitSite& site) final;
  void abort(const std::string& reason) final;
  std::unique_ptr<Communicator> split(int color, int key) final;
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) final;

  int device() const { return share_->device(); }
  /// What this rank has of its GPU.
  GpuShare& share() const { return *share_; }
  /// For a thread that works for this rank and is not its own (UseShare).
  const std::shared_ptr<GpuShare>& share_owner() const { return share_; }
  /// Whether every rank reaches every other's memory.
  bool one_node() const { return one_node_; }
  /// Whether kernels can add to words in every other rank's memory; of one rank: yes.
  bool has_peer_atomics() const { return peer_atomics_; }
  /// What operators of this rank enqueue on; this rank's own stream unless set.
  cudaStream_t stream() const { return stream_; }
  void set_stream(cudaStream_t stream);
  /// Of an emulated link: what this rank sends by other means than kernels with a PeerTable is held
  /// up by it, too. None: null.
  Line* line() const { return line_ ? line_->get() : nullptr; }
  /// That link; none: null.
  const EmulatedLink* emulated_link() const { return line_ ? &line_->link() : nullptr; }
  Watch watch() const { return {record_.get(), uint64_t(deadline_s_ * 1e9)}; }

  /// Throws Timeout or Aborted when a device-side wait of this rank gave up.
  void check_device() const;
  /// Blocks until `stream()` is empty; then as `check_device`. Throws Timeout when it does not end.
  void synchronize() const;
  /// Whether other ranks enqueue on the same GPU: a call of CUDA that blocks one blocks all.
  virtual bool shares_gpu() const { return false; }
  /// What `step` enqueues of a collective call, within an Enqueueing. It may be captured before.
  template <typename Step>
  void enqueue(const Step& step) {
    if (shares_gpu()) prepare(step);
    step();
  }
  /// Ranks that share a GPU: what has to be loaded and allocated for `step` is, on all of them,
  /// before any of them enqueues the call at hand.
  virtual void prepare(const std::function<void()>& step) { static_cast<void>(step); }
  /// Collective: `step` on every rank, and an error on all of them where one could not take it. So
  /// nobody goes on to what all must do together, and waits there.
  void agree_on(std::string_view what, const std::function<void()>& step);
  /// Collective: the largest of the ranks' values, by element.
  std::vector<double> slowest(std::span<const double> mine);

  /// One T for as long as this communicator lives: what `make` returns (a new T) at first use.
  template <typename T, typename Make>
  T& attached(Make make) {
    auto& slot = attached_[std::type_index(typeid(T))];
    if (!slot) slot = std::shared_ptr<T>(make());
    return *static_cast<T*>(slot.get());
  }

 protected:
  /// Collective over `control`, which must outlive this, as it does where `world` or what this is
  /// split from holds it. Uses the share that this thread has.
  explicit GpuCommunicator(Communicator& control, std::shared_ptr<HeldWorld> world = nullptr);

  /// Collective; the arguments are the same on all ranks.
  virtual std::shared_ptr<GpuBuffer> do_allocate(size_t bytes, int signals) = 0;
  /// Collective: a communicator of the same transport over `control`.
  virtual std::unique_ptr<GpuCommunicator> do_split(Communicator& control) = 0;
  /// Ends what the transport has under way, which knows no deadline. After a failure.
  virtual void do_give_up() const {}
  /// Symmetric memory that ranks could not agree to free, as one of them failed.
  virtual void abandon(std::vector<OwnedSymmetric> left) = 0;

  /// By the transport's constructor; `line` outlives this.
  void use(const OwnedLine& line);
  /// By the transport's destructor, first: frees what is attached and all symmetric memory. Any
  /// thread, whose GPU it is.
  void end();
  /// None in run_gpus.
  const std::shared_ptr<HeldWorld>& held_world() const { return world_; }
  void give_up() const;
  /// Called when this rank has enqueued its part of a call whose kernels wait for other ranks'.
  /// Ranks that share a GPU leave the call together (one_gpu_communicator.h); others go on at once.
  virtual void enqueued() noexcept {}

  /// Where the host threads of the ranks are, as far as this process knows: "rank 1: read < copy".
  virtual std::string where_ranks_are() const { return ""; }
  /// By a host that has waited so long for other ranks: what errors then say of them.
  void note_late(double waited_s) const;

  bool failed() const { return failed_; }
  /// Throws Aborted, or the Timeout of this rank's device, where a rank has called `abort`.
  void look_for_abort() const;

  Communicator& control_;
  bool one_node_ = true, peer_atomics_ = true;

 private:
  void synchronize(cudaStream_t stream, std::string_view what) const;
  void end_alone();
  void free_retired();
  void end_device_waits() const;
  template <typename Call>
  auto giving_up_if_aborted(const Call& call) const;

  // These go last.
  std::shared_ptr<HeldWorld> world_;
  std::shared_ptr<Communicator> parent_;         // of a split, where that has owners
  std::shared_ptr<Communicator> owned_control_;  // of a split
  int open_calls_ = 0;
  std::shared_ptr<SymmetricBuffer> aborts_;  // the control's: waiting for its epoch 0 tells of one
  std::shared_ptr<GpuShare> share_;
  mutable std::atomic<bool> failed_ = false;  // any thread may abort
  mutable std::string where_;                 // of the ranks' threads, once one was late
  Retired<OwnedSymmetric> retired_;
  Mapped<ErrorRecord> record_;
  Mapped<uint64_t> seen_;
  Stream own_stream_;
  CommonStream polls_{Common::prompt};
  std::optional<CommonStream> copies_;  // from the first put on
  Event produced_;
  cudaStream_t stream_;
  const OwnedLine* line_ = nullptr;
  std::optional<PacedCopies> paced_puts_;
  std::map<std::type_index, std::shared_ptr<void>> attached_;

  friend class GpuBuffer;
  friend class Enqueueing;
};

/// Around what a collective call enqueues, calls within it included: `enqueued` at its end.
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

/// Whether calls may be replayed as CUDA graphs, whose branches need hardware queues of their own.
bool replays_graphs();

/// The GPU rank's face of `comm`. Throws InvalidArgument when it is a transport of CPU ranks.
GpuCommunicator& as_gpu(Communicator& comm);

}  // namespace tandem::gpu
