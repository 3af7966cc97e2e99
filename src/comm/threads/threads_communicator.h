// `threads` transport: ranks are threads of one process. A put is a memcpy and a release store, or
// a transfer on the rank's emulated link.
#pragma once

#include <chrono>
#include <memory>

#include "comm/base.h"
#include "comm/threads/world.h"

namespace tandem::threads {

class ThreadsCommunicator final : public BaseCommunicator {
 public:
  ThreadsCommunicator(std::shared_ptr<Group> group, int rank, double deadline_s);
  ~ThreadsCommunicator() override { settle(); }

  std::string_view transport() const override { return "threads"; }
  std::string link() const override;
  void flush() override;
  /// Returns when everything that this rank has put has arrived. Throws Timeout.
  void drain();
  void abort(const std::string& reason) override;

 protected:
  std::shared_ptr<SymmetricBuffer> do_allocate(size_t bytes, int signals) override;
  void do_put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source, size_t bytes,
              int signal, uint64_t epoch) override;
  void do_raise(int peer, SymmetricBuffer& buffer, int signal, uint64_t epoch) override;
  uint64_t do_read_signal(const SymmetricBuffer& buffer, int signal) const override;
  void do_wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
               const WaitSite& site) override;
  std::unique_ptr<Communicator> do_group(const std::string& name, const std::vector<int>& members,
                                         int index) override;
  std::shared_ptr<SymmetricBuffer> do_allocate_workspace(size_t bytes, int signals) override;
  std::byte* look_at(const SymmetricBuffer& buffer, int rank) const override;

 private:
  /// Buffer that all ranks make under this name.
  std::shared_ptr<SymmetricBuffer> obtain_buffer(const std::string& name, size_t bytes,
                                                 int signals);
  /// Waits until no transfer reads memory that is about to be freed, by exception unwinding or with
  /// this communicator.
  void settle() const;
  std::chrono::steady_clock::time_point deadline_from_now() const;

  std::shared_ptr<Group> group_;
  Link* const link_;
  uint64_t allocations_ = 0;  // equal on every rank
};

}  // namespace tandem::threads
