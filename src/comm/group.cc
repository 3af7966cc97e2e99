#include "comm/group.h"

#include <algorithm>

#include "comm/base.h"

namespace tandem {

std::unique_ptr<Communicator> make_group(Communicator& comm, std::string_view name,
                                         const std::vector<int>& members) {
  if (auto* const base = dynamic_cast<BaseCommunicator*>(&comm)) return base->group(name, members);
  const auto me = std::find(members.begin(), members.end(), comm.rank());
  return comm.split(members.front(), int(me - members.begin()));
}

}  // namespace tandem
