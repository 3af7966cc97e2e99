// The control plane of ranks that are processes without MPI: exchange, barrier, abort and split
// over TCP, through a hub in rank 0's process. It has no symmetric buffers: the transport that
// stands on it (nccl) brings its own.
//
// A rank that never comes is named by Timeout, one whose process ends by Aborted.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/hub.h"
#include "comm/control/launch.h"
#include "tandem/communicator.h"

namespace tandem::control {

class ControlCommunicator final : public Communicator {
 public:
  /// Collective. Throws Timeout naming rank 0 when nobody listens within the deadline.
  ControlCommunicator(const Launch& launch, double deadline_s);
  ~ControlCommunicator() override;

  std::string_view transport() const override { return "control"; }
  std::string link() const override { return "tcp"; }
  std::shared_ptr<SymmetricBuffer> allocate(size_t, int) override;
  void put(int, SymmetricBuffer&, size_t, const void*, size_t, int, uint64_t) override;
  void flush() override {}
  uint64_t read_signal(const SymmetricBuffer&, int) const override;
  void wait(const SymmetricBuffer&, int, uint64_t, const WaitSite&) override;
  void abort(const std::string& reason) override;
  /// The new group's hub is with its first rank.
  std::unique_ptr<Communicator> split(int color, int key) override;
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) override;

 private:
  ControlCommunicator(const Launch& launch, Connection listener, double deadline_s);
  void send(const Header& header, std::string_view name, std::span<const std::byte> blob);

  std::mutex sending_;      // abort comes from any thread
  std::optional<Hub> hub_;  // rank 0
  Connection connection_;
  uint64_t round_ = 0;
};

}  // namespace tandem::control

namespace tandem {

/// Runs `body` on this process's rank. An error aborts the other ranks and is rethrown.
void run_control(const Launch& launch, const WorldOptions& options,
                 const std::function<void(Communicator&)>& body);

}  // namespace tandem
