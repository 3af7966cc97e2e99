// A rank's card in its symmetric memory: the call that it is in, and the caller's memory that the
// call uses. Peers that share memory look at it, without a message: to say after a deadline where a
// peer is instead, and, as threads of one process, whether it writes to memory that they use.
//
// Operands are written for every call of an operator, two calls deep, and compared once every peer
// has begun it, before the call sends or writes anything. A rank begins call c + 2 after all others
// have begun c + 1, hence have compared those of c.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/operands.h"

namespace tandem {

class Communicator;
class Workspace;

/// Zeros are a card without a call.
struct CallCard {
  static constexpr size_t kWords = 16, kOperands = 8;
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
  std::array<uint64_t, kWords> text;  ///< a peer reads it at any time
  uint64_t has_left;                  ///< 1 after a call that an error ended; likewise
  std::array<Operands, 2> operands;   ///< by the call's parity
};

/// While it lives, this rank is in a call. In a call inside another one it changes nothing. What an
/// error ends stays on the card, as no other call follows it.
class CallOnCard {
 public:
  CallOnCard(Communicator& comm, std::string_view name);
  ~CallOnCard();
  CallOnCard(const CallOnCard&) = delete;
  CallOnCard& operator=(const CallOnCard&) = delete;

  /// `name`: at most 15 characters.
  void reads(std::string_view name, const Tensor& tensor) { use(name, tensor, false); }
  void writes(std::string_view name, const Tensor& tensor) { use(name, tensor, true); }
  /// After the operands and before the call sends or writes anything: waits until the other ranks
  /// of this process have begun it. Throws AgreedArgument naming `op`, the same on all ranks, if
  /// one writes to what another one uses, and Aborted if one of them has left.
  void require_apart(std::string_view op);

 private:
  void use(std::string_view name, const Tensor& tensor, bool written);

  Communicator& comm_;
  Workspace* space_ = nullptr;  // nullptr where there are no cards
  CallCard* card_ = nullptr;
  CallCard::Operands* own_ = nullptr;
  const int errors_;
};

/// Marks that an error has ended a call of this rank: its operands may be freed.
void mark_left(const Communicator& comm);
/// Throws Aborted naming `op` and a peer that did.
void require_all_stay(const Communicator& comm, std::string_view op);

/// After a wait for `peer` that was in vain: "rank 1 is in …, rank 0 in …: expected the same call
/// on all ranks"; empty where it is in the same one, or cannot be looked at.
std::string describe_peers_call(const Communicator& comm, int peer);

}  // namespace tandem
