// Guard against diverged epochs. Ranks stay in step because each advances its epochs by one per
// call. A call that throws half-way may have advanced them without sending all of its data: peers
// would take the next call's signals for this one's and read memory that was never written. So
// after such an error no further call is allowed.
#pragma once

#include <optional>
#include <string_view>

#include "comm/agreement.h"
#include "core/system/process/fork.h"
#include "tandem/communicator.h"

namespace tandem {

class Progress {
 public:
  /// `op` must outlive this (a literal).
  Progress(Communicator& comm, std::string_view op) : comm_(comm), op_(op) {}

  /// Runs `call`, which advances epochs, and returns its result. Throws Aborted after a call that
  /// threw, unless it threw Mismatch, AgreedError or AgreedArgument, after which all ranks continue
  /// together. If an error other than a wait's ends the call, the other ranks' waits for this rank
  /// end, too.
  template <typename Call>
  auto during(const Call& call) {
    require_even();
    try {
      return waiting(call);
    } catch (const Mismatch&) {
      throw;
    } catch (const AgreedError&) {
      throw;
    } catch (const AgreedArgument&) {
      throw;
    } catch (const std::exception& error) {
      give_up(error.what());
      throw;
    }
  }
  /// Runs the waiting part of a call.
  template <typename Wait>
  auto waiting(const Wait& wait) {
    try {
      return wait();
    } catch (const Timeout& error) {
      end(error.what());
      refine(error);
      throw;
    } catch (const Aborted& error) {
      end(error);
      throw;
    }
  }

  /// Throws in a forked child, and Aborted after a call that threw.
  void require_even() const;
  /// Records an error that the other ranks detect on their own.
  void end(std::string_view reason);
  void end(const Aborted& error);
  /// Rethrows the timeout with a note of the call that the peer is in, if it is another call.
  void refine(const Timeout& error) const;
  /// Records any other error and aborts the other ranks' waits. No-op if the call has ended
  /// already.
  void give_up(std::string_view reason) noexcept;

 private:
  void leave();

  Communicator& comm_;
  std::string_view op_;
  ProcessMark process_;
  bool ended_ = false;
  std::optional<Aborted> reason_;
};

}  // namespace tandem
