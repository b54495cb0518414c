"""Moving sessions: the one pipeline behind copy, backup, export, import and salvage.

    rows      what the rows of a session are; reading them from a store or a bundle
    objects   sending the objects that the target lacks, children before parents
    publish   writing the rows under conditions, and repeating that when other writers interfere
    building  a session that another system describes, as objects and rows

Every transfer takes the same steps: read the head, then the other rows of the session; compare
them with the session that the target has; store the objects that the target lacks; publish the
rows in one write. Until that write gc's grace period keeps the objects. The write requires that
the target's session is unchanged and that every object that the rows name is stored, so a reader of
the target sees all of the change or none of it (P5). A transfer that is interrupted leaves a sound
target, and finds what it has sent when it is called again.
"""
