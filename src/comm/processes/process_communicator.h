// Communicator of transports whose ranks are processes, mpi and processes. Ranks of one host share
// their symmetric memory: a put is a copy, a store and a wake-up, made by the caller. Ranks of
// different hosts exchange messages through the Engine.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/base.h"
#include "comm/processes/engine.h"
#include "comm/processes/shared/process_buffer.h"

namespace tandem::processes {

class ProcessCommunicator final : public BaseCommunicator {
 public:
  /// `world_ranks`: this communicator's ranks, in order. `id` is equal on all of them and not used
  /// by any other communicator of theirs. Costs no message.
  ProcessCommunicator(Engine& engine, uint64_t id, int rank, std::vector<int> world_ranks,
                      double deadline_s);
  ~ProcessCommunicator() override;

  std::string_view transport() const override { return engine_.transport(); }
  std::string link() const override;
  void flush() override;
  void abort(const std::string& reason) override;

 protected:
  std::shared_ptr<SymmetricBuffer> do_allocate(size_t bytes, int signals) override;
  void do_put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source, size_t bytes,
              int signal, uint64_t epoch) override;
  uint64_t do_read_signal(const SymmetricBuffer& buffer, int signal) const override;
  void do_wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
               const WaitSite& site) override;
  std::unique_ptr<Communicator> do_group(const std::string& name, const std::vector<int>& members,
                                         int index) override;
  std::shared_ptr<SymmetricBuffer> do_allocate_workspace(size_t bytes, int signals) override;
  /// By the store in large groups, which costs a rank two messages.
  bool do_exchange(std::span<const std::byte> blob, std::string_view what,
                   std::vector<std::vector<std::byte>>& all) override;

 private:
  /// Meets the other ranks at the store.
  control::Met meet(std::string_view what, std::string_view compared,
                    std::span<const std::byte> blob);
  /// Reads the other ranks' addresses, when something is first sent to them.
  void learn_ranks() const;
  /// Throws Aborted or Timeout if the store's reply does not arrive.
  void await(const control::StoreClient::Pending& reply, const WaitSite& site);
  /// First of the members that have not come to a meeting; -1 if all have, nullopt if the store
  /// does not reply soon.
  std::optional<int> find_missing(const std::string& meeting);
  /// Maps the memory of this host's ranks, which `creator` makes (-1: another rank).
  std::shared_ptr<ProcessBuffer> open_buffer(uint64_t number, const BufferLayout& layout,
                                             int creator);
  std::string buffer_key(uint64_t number) const;
  /// Collective: runs `step` on every rank, and throws an AgreedError on all of them naming the
  /// first rank where it failed.
  template <typename Step>
  void agree_on(const Step& step);
  void send_put(int peer, const Header& header, const void* source);
  FutexWaiter::Clock::time_point deadline_from_now() const;
  /// Throws Aborted or Timeout. Puts that have not started are dropped first, and started ones are
  /// waited for, so that no caller's memory is read after the error has left this communicator.
  [[noreturn]] void fail(const WaitSite& site, uint64_t epoch, uint64_t seen);
  void drop_puts();
  /// True if rank `peer` of this communicator has ended its run; false for -1.
  bool has_ended(int peer) const;
  /// True if `ready()`, false at the deadline or after an abort. Throws what a wait check throws,
  /// after the caller's memory is no longer read.
  template <typename Ready>
  bool wait_until(const Ready& ready, FutexWaiter::Clock::time_point deadline, bool by_message);
  /// Waits until no put's source is being read; false at the deadline or after an abort.
  bool all_sent();

  Engine& engine_;
  const uint64_t id_;
  const std::vector<int> world_ranks_;
  mutable bool learnt_ = false;
  mutable bool by_message_ = false;       ///< some rank is reached by messages
  mutable std::vector<int> local_ranks_;  ///< ranks that share memory, this one included
  std::shared_ptr<PendingPuts> pending_ = std::make_shared<PendingPuts>();
  bool stuck_ = false;  ///< dropped puts are still in flight: further waiting is futile
  uint64_t buffers_made_ = 0, meetings_ = 0;
};

}  // namespace tandem::processes
