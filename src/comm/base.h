// Common base of the CPU transports: argument checks, the control plane (`exchange`, and with it
// barrier, require_same and the agreement of allocate and split) and the workspace of the
// uncompressed collectives. A transport derives from BaseCommunicator, implements the hooks and
// calls `start()` in its constructor. The buffers of both are made at first use, so that a group
// costs nothing until then.
//
// `exchange` runs on put and wait over a small symmetric buffer. In round r every rank puts one
// slot to every other rank and waits for their slots. Slots alternate with the round's parity: a
// rank enters round r + 2 only after every other rank has entered r + 1 and thus has read round r,
// so two slots suffice and no acknowledgement is needed. Every rank sees every rank's slot, so all
// of them find the same mismatch, and a rank that never arrives is waited for, and named, directly.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/progress.h"
#include "comm/workspace.h"
#include "core/system/process/fork.h"
#include "tandem/communicator.h"

namespace tandem {

class BaseCommunicator : public Communicator {
 public:
  std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) final;
  void put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source, size_t bytes,
           int signal, uint64_t epoch) final;
  uint64_t read_signal(const SymmetricBuffer& buffer, int signal) const final;
  void wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch, const WaitSite& site) final;
  std::unique_ptr<Communicator> split(int color, int key) final;
  /// Implements make_group (comm/group.h).
  std::unique_ptr<Communicator> group(std::string_view name, const std::vector<int>& members);
  void make_workspace();
  /// Rank of the world of a rank of this communicator.
  int world_rank(int rank) const {
    return world_ranks_.empty() ? rank : world_ranks_[size_t(rank)];
  }
  /// Number for spans (comm/flow_spans.h), equal on all its ranks; and next numbers of a stream of
  /// messages and of a collective call.
  uint32_t trace_id() const { return trace_id_; }
  uint32_t next_stream();
  int64_t next_call() { return ++traced_calls_; }
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) final;

 protected:
  using Communicator::Communicator;

  /// Collective; the arguments have been checked to be equal on all ranks.
  virtual std::shared_ptr<SymmetricBuffer> do_allocate(size_t bytes, int signals) = 0;
  /// Arguments of the following hooks are in range.
  virtual void do_put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source,
                      size_t bytes, int signal, uint64_t epoch) = 0;
  /// Raises a signal that does not count as traffic: it bypasses an emulated link.
  virtual void do_raise(int peer, SymmetricBuffer& buffer, int signal, uint64_t epoch) {
    do_put(peer, buffer, 0, nullptr, 0, signal, epoch);
  }
  virtual uint64_t do_read_signal(const SymmetricBuffer& buffer, int signal) const = 0;
  virtual void do_wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                       const WaitSite& site) = 0;
  /// Communicator of `members`, ranks of this one in their new order, of which this rank is
  /// `members[index]`. Called by all of them with the same `name`, which no other group of the same
  /// members has. Does not wait for them.
  virtual std::unique_ptr<Communicator> do_group(const std::string& name,
                                                 const std::vector<int>& members, int index) = 0;
  /// do_allocate, but not collective: each rank calls it when it needs the memory.
  virtual std::shared_ptr<SymmetricBuffer> do_allocate_workspace(size_t bytes, int signals) = 0;
  /// Collective: `exchange` by other means, on all ranks or on none; false: on none.
  virtual bool do_exchange(std::span<const std::byte>, std::string_view,
                           std::vector<std::vector<std::byte>>&) {
    return false;
  }

  void start(Reach reach) { reach_ = reach; }
  /// Name of the call for which memory is allocated.
  std::string_view call() const { return call_; }
  /// Address of a peer's memory of `buffer`, read for error texts; nullptr if it is not
  /// addressable.
  virtual std::byte* look_at(const SymmetricBuffer& buffer, int rank) const {
    return buffer.peer(rank);
  }
  /// Frees both buffers, for a transport whose buffers must be destroyed before it.
  void stop();

  /// Detects a forked child, which must not wait, send or free anything.
  const ProcessMark process_;

 private:
  void exchange_all(std::span<const std::byte> blob, std::string_view what,
                    std::vector<std::vector<std::byte>>& all);
  void exchange_round(std::span<const std::byte> chunk, size_t total, std::string_view what);
  const std::byte* control_slot(int source) const;

  Reach reach_ = Reach::no_addresses;
  std::string_view call_ = "allocate";
  std::unique_ptr<Communicator> make_member(const std::string& name,
                                            const std::vector<int>& members, int index);

  std::vector<int> world_ranks_;  ///< empty: this is the world
  uint32_t trace_id_ = 1;
  int streams_ = 0;
  int64_t traced_calls_ = 0;
  std::map<std::string, int> groups_made_;  ///< by name and members
  int splits_ = 0;
  std::shared_ptr<SymmetricBuffer> control_;
  std::vector<std::byte> outgoing_;  // one slot per round parity
  uint64_t round_ = 0;
  Progress progress_{*this, "exchange"};
};

}  // namespace tandem
