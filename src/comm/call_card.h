// A rank's call card in its symmetric memory: the call it is in, and the caller's memory that the
// call uses. Peers that share memory read it without a message: after a deadline, to report which
// call a peer is in instead, and, as threads of one process, to check whether it writes to memory
// that they use.
//
// Operands are written for every call of an operator, two calls deep, and compared once every peer
// has begun the call, before the call sends or writes anything. A rank begins call c + 2 after all
// others have begun c + 1 and thus have compared the operands of c.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/cpu/float_mode.h"
#include "core/operands.h"

namespace tandem {

class Communicator;
class Workspace;

/// Zero-initialized: a card without a call.
struct CallCard {
  static constexpr size_t kWords = 16, kOperands = 9;
  struct Used {
    std::array<char, 15> name;
    bool written;
    ByteRows rows;
  };
  struct Operands {
    uint64_t call;
    uint64_t count;
    std::array<Used, kOperands> used;
  };
  std::array<uint64_t, kWords> text;  ///< read by peers at any time
  uint64_t has_left;  ///< 1 after an error has ended a call; read by peers at any time
  std::array<Operands, 2> operands;  ///< indexed by the call's parity
};

/// Scope of a call of this rank, in which its thread has the default float mode. Nested in another
/// call it changes nothing. After an error the entry remains on the card, as no other call follows.
class CallOnCard {
 public:
  CallOnCard(Communicator& comm, std::string_view name);
  ~CallOnCard();
  CallOnCard(const CallOnCard&) = delete;
  CallOnCard& operator=(const CallOnCard&) = delete;

  /// `name`: at most 15 characters.
  void reads(std::string_view name, const Tensor& tensor) { use(name, tensor, false); }
  void writes(std::string_view name, const Tensor& tensor) { use(name, tensor, true); }
  /// Called after the operands are listed and before the call sends or writes anything: waits until
  /// the other ranks of this process have begun it. Throws AgreedArgument naming `op`, the same on
  /// all ranks, if one rank writes to memory that another uses, and Aborted if a rank has left.
  void require_apart(std::string_view op);

 private:
  void use(std::string_view name, const Tensor& tensor, bool written);

  Communicator& comm_;
  const cpu::FloatMode mode_;
  Workspace* space_ = nullptr;  // nullptr if there are no cards
  CallCard* card_ = nullptr;
  CallCard::Operands* local_operands_ = nullptr;
  const int errors_;
};

/// Marks that an error has ended a call of this rank: its operands may be freed.
void mark_left(const Communicator& comm);
/// Throws Aborted naming `op` and a peer that an error has ended, if there is one.
void require_all_stay(const Communicator& comm, std::string_view op);

/// Describes a timed-out wait for `peer`: "rank 1 is in …, rank 0 in …: expected the same call on
/// all ranks"; empty if it is in the same call or its card is not accessible.
std::string describe_peers_call(const Communicator& comm, int peer);

}  // namespace tandem
