#include "base/patience.h"

#include <algorithm>

namespace ddl {

Patience within(Patience patience, double timeout_seconds) {
    patience.timeout_seconds = timeout_seconds;
    patience.warn_seconds = std::min(patience.warn_seconds, timeout_seconds / 2);
    patience.ask_seconds = std::min(patience.ask_seconds, timeout_seconds / 4);
    return patience;
}

}  // namespace ddl
