// What ranks tell one another outside of collectives, so that a hang gets a name.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/header.h"
#include "transport/transport.h"

namespace ddl {

enum class NoticeKind : uint32_t {
    query = 1,  // "have you made call `sequence` of communicator `comm`?"
    answer,     // `arrived`, and `call`: that call, or else the last one made; `text`: what of its own it waits for
    abort,      // the communicator is broken: `code` and `text`
    goodbye,    // the sender has finalized; `call` is its last
    freed,      // the sender has freed the communicator; `call` is its last
};

struct NoticeContent {
    NoticeKind kind = NoticeKind::query;
    uint32_t comm = 0;
    uint64_t birth = 0;  // of the communicator
    uint64_t sequence = 0;
    uint32_t arrived = 0;
    int32_t code = 0;
    Header call;  // magic 0: none
    std::string text;
};

// To all of these ranks but this one. Long texts are cut to what a notice holds.
void send_notice(Transport& transport, const std::vector<int>& ranks, const NoticeContent& content);

// False if the notice is none of ours.
bool read_notice(const Notice& notice, NoticeContent* content);

}  // namespace ddl
