// Ranks stay together because each advances its epochs by one a call. A call that throws half-way
// may have advanced them and not sent all that they stand for: the next one would be taken for it,
// with memory that was never written. So there is no next one.
#pragma once

#include <optional>
#include <string_view>

#include "comm/agreement.h"
#include "core/fork.h"
#include "tandem/communicator.h"

namespace tandem {

class Progress {
 public:
  /// `op` must outlive this (a literal).
  Progress(Communicator& comm, std::string_view op) : comm_(comm), op_(op) {}

  /// What `call` returns, which advances epochs. Throws Aborted after a call that threw, unless it
  /// was Mismatch, AgreedError or AgreedArgument, from which all ranks go on together. Where
  /// another error than a wait's ends it, the other ranks' waits for this one end, too.
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
  /// Of a call, the part that waits.
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
  /// After an error that the other ranks see for themselves.
  void end(std::string_view reason);
  void end(const Aborted& error);
  /// Throws the same with the call that the peer is in, where that is another.
  void refine(const Timeout& error) const;
  /// After any other: aborts their waits. Nothing where the call has ended already.
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
